"""Online calibration of token scores for the current text."""

from dataclasses import dataclass

from inference.stopping.interface import sigmoid

DRIFT = 0.03  # share of the prior's variances added per round: text has easy and hard stretches


@dataclass(frozen=True)
class Belief:
    """The prior: mean and standard deviation of the offset a and of the slope b (see `Trust`)."""

    offset: tuple[float, float]
    slope: tuple[float, float]


class Trust:
    """c = sigmoid(a + b z): the probability that a token of score z is right, z a logit.

    With a = 0 and b = 1 the score is used unchanged; with b = 0 it is ignored. Every tested token updates both by one
    Newton step on the posterior of a logistic regression (an extended Kalman filter). The offset models the text:
    tokens of one text are correlated, unlike independent trials with one probability.
    """

    def __init__(self, prior: Belief):
        (self.offset, offset), (self.slope, slope) = prior.offset, prior.slope
        self._prior = offset**2, slope**2
        self._variance = (*self._prior, 0.0)  # of the offset, of the slope, and their covariance

    def probability(self, score: float) -> float:
        """The probability c of a token with this score."""
        return sigmoid(self.offset + self.slope * score)

    def drift(self) -> None:
        """Increase the variances for another round."""
        (offset, slope, both), (first, second) = self._variance, self._prior
        self._variance = (offset + DRIFT * first, slope + DRIFT * second, both)

    def learn(self, score: float, right: bool) -> None:
        """Learn from a tested token with this score."""
        offset, slope, both = self._variance
        c = self.probability(score)
        certainty = c * (1 - c)
        u, v = offset + both * score, both + slope * score  # the covariances of a + b z with a and with b
        total = 1 + certainty * (u + v * score)
        shrunk = certainty / total
        self._variance = (offset - shrunk * u * u, slope - shrunk * v * v, both - shrunk * u * v)
        self.offset += u / total * (right - c)
        self.slope += v / total * (right - c)
