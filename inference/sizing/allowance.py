"""A bound on the loss of drafting against plain decoding."""

from inference.sizing.costs import WIDEST, Costs

LOSS = 0.02  # share of plain decoding's rate
# Rounds that the running rate averages over: each round reduces the weight of earlier ones by 1 / MEMORY. A useful
# drafter is sometimes wrong several times in a row: with 33, two such rounds exceeded the allowance.
MEMORY = 100


class Allowance:
    """Skips drafting in rounds where drafts do not pay.

    The running rate is this generation's tokens per second by the measured costs, and starts at plain decoding's. While
    it is more than `loss` below plain decoding's rate, rounds skip drafting. Such rounds are plain decoding and raise
    the running rate again, so another draft is tried eventually. A useless drafter costs at most `loss` plus one draft;
    a useful one drafts in almost every round.

    loss: the share of plain decoding's rate that may be lost. A generation of N tokens loses at most
    (MEMORY + N) · loss tokens and one draft.
    """

    def __init__(self, costs: Costs, loss: float = LOSS):
        self._costs, self._loss = costs, loss
        self._emitted, self._seconds = float(MEMORY), MEMORY * costs.plain

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self._emitted / self._seconds

    def spent(self) -> bool:
        """Whether this round skips drafting."""
        return self.rate < (1 - self._loss) / self._costs.plain

    def observe(self, fed: list[int], submitted: int, emitted: int) -> None:
        """Learn from a round.

        fed: rows of each drafter pass, empty if drafting was skipped; submitted: drafted tokens that were verified;
        emitted: tokens that the round produced.
        """
        costs = self._costs
        seconds = costs.plain
        if fed:
            drafting = sum(costs.step[min(rows, WIDEST)] for rows in fed)
            seconds = drafting + costs.verify[min(submitted + 1, WIDEST)] + costs.rest
        kept = 1 - 1 / MEMORY
        self._emitted = kept * self._emitted + emitted
        self._seconds = kept * self._seconds + seconds
