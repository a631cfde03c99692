"""How far a score of tokens is to be trusted in the text at hand: a calibration that learns as the text goes."""

from dataclasses import dataclass

from inference.stopping.interface import sigmoid

DRIFT = 0.03  # of the prior's variances is added when another round follows: text has easy and hard stretches


@dataclass(frozen=True)
class Belief:
    """What is believed of a text beforehand: mean and deviation of the offset a and of the slope b (see `Trust`)."""

    offset: tuple[float, float]
    slope: tuple[float, float]


class Trust:
    """c = sigmoid(a + b z): the probability that a token of score z is right, z a logit.

    With a = 0 and b = 1 the score is taken at its word, with b = 0 not looked at. Every tested token moves both, by one
    step of Newton's method on the posterior of a logistic regression (an extended Kalman filter). The offset is the
    text's own effect. Tokens of one text are right more or less often together, which independent trials with one
    probability are not.
    """

    def __init__(self, prior: Belief):
        (self.offset, offset), (self.slope, slope) = prior.offset, prior.slope
        self._prior = offset**2, slope**2
        self._variance = (*self._prior, 0.0)  # of the offset, of the slope, and their covariance

    def probability(self, score: float) -> float:
        """c of a token of this score."""
        return sigmoid(self.offset + self.slope * score)

    def drift(self) -> None:
        """Another round follows."""
        (offset, slope, both), (first, second) = self._variance, self._prior
        self._variance = (offset + DRIFT * first, slope + DRIFT * second, both)

    def learn(self, score: float, right: bool) -> None:
        """A token of this score was tested."""
        offset, slope, both = self._variance
        c = self.probability(score)
        certainty = c * (1 - c)
        u, v = offset + both * score, both + slope * score  # the covariances of a + b z with a and with b
        total = 1 + certainty * (u + v * score)
        shrunk = certainty / total
        self._variance = (offset - shrunk * u * u, slope - shrunk * v * v, both - shrunk * u * v)
        self.offset += u / total * (right - c)
        self.slope += v / total * (right - c)
