"""What drafting may lose against plain decoding."""

from inference.sizing.costs import WIDEST, Costs

LOSS = 0.02  # of plain decoding's rate
# Rounds that the rate is of: the weight of a round fades by 1 / MEMORY with each one after it. A drafter that pays is
# wrong several times on end now and then: with 33, two such rounds were more than the allowance.
MEMORY = 100


class Allowance:
    """Rounds without a draft, where drafts do not pay.

    The running rate is tokens per second of this generation, by the measured costs, of all its rounds, and it starts at
    plain decoding's. While it is more than `loss` below that, no draft is made. Such a round is one of plain decoding,
    and it brings the rate nearer to that again, so sooner or later another draft is tried. A drafter that never is
    right is asked in as many rounds as that allows, and loses that and one draft at most; one that pays is asked in
    nearly every round.

    loss: what is given away of plain decoding's rate. A generation of N tokens gives away (MEMORY + N) of these, and
    one draft, at most.
    """

    def __init__(self, costs: Costs, loss: float = LOSS):
        self._costs, self._loss = costs, loss
        self._emitted, self._seconds = float(MEMORY), MEMORY * costs.plain

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self._emitted / self._seconds

    def spent(self) -> bool:
        """Whether this round is to go without a draft."""
        return self.rate < (1 - self._loss) / self._costs.plain

    def observe(self, fed: list[int], submitted: int, emitted: int) -> None:
        """A round ended.

        fed: the rows of each pass of the drafter, none where it was not asked; submitted: drafted tokens that were
        verified; emitted: tokens of the round.
        """
        costs = self._costs
        seconds = costs.plain
        if fed:
            drafting = sum(costs.step[min(rows, WIDEST)] for rows in fed)
            seconds = drafting + costs.verify[min(submitted + 1, WIDEST)] + costs.rest
        kept = 1 - 1 / MEMORY
        self._emitted = kept * self._emitted + emitted
        self._seconds = kept * self._seconds + seconds
