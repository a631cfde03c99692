"""max_draft=auto: the chain length with the best rate, chosen again before every round."""

from inference.settings.limits import LONGEST_CHAIN
from inference.sizing.policy import Evidence, Tuning, best_length, trials_in_chain
from inference.stopping.interface import Step


class BestLength:
    """The length with the most tokens per second, from measured costs and the acceptance of each position so far."""

    max_draft = LONGEST_CHAIN

    def __init__(self, tuning: Tuning):
        self._costs = tuning.costs
        self._evidence = Evidence(self.max_draft, tuning)
        self.length = best_length(self._evidence.shares(), self._costs)[0]

    def stop(self, step: Step) -> bool:
        return step.drafted >= self.length

    def observe(self, drafted: int, accepted: int) -> None:
        self._evidence.add(trials_in_chain(drafted, accepted))
        self.length = best_length(self._evidence.shares(), self._costs)[0]
