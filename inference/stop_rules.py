"""When to stop drafting and verify. A rule sees what it drafted, and after each round what was accepted."""

import random
from dataclasses import dataclass
from typing import Protocol

import torch


class StopRule(Protocol):
    """Asked after every drafted token, told the outcome of every round.

    The token just drafted is always submitted for verification: a rule that could withdraw it would bias
    the emitted law under sampling.
    """

    max_draft: int  # drafted tokens a round may have at most

    def stop(self, drafted: int) -> bool:
        """Whether to verify now, `drafted` ≥ 1 tokens into the round."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """The round submitted `drafted` tokens, of which `accepted` were right."""
        ...


@dataclass
class FixedLength:
    """Always draft `max_draft` tokens (the K of plain speculative decoding)."""

    max_draft: int

    def stop(self, drafted: int) -> bool:
        return drafted >= self.max_draft

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class BetaThompson:
    """Thompson sampling on "is the next draft token right?" with a Beta posterior (EESD, Algorithm 2).

    After each drafted token θ ~ Beta(α, β) and χ ~ Bernoulli(θ); χ = 0 ends the draft. With |Q_d| tokens
    drafted and |Q_v| accepted, α += r and β += n − r, where n = min(|Q_v| + 1, |Q_d|) tokens were tested and

    - update="natural": r = |Q_v|, each tested token is one Bernoulli trial;
    - update="printed": r = max(|Q_v| − 1, 0) as in the paper, clamped because α must stay positive. It
      charges a failure even to a fully accepted draft, so it drafts shorter.
    """

    def __init__(self, max_draft: int, alpha: float, beta: float, update: str, generator: torch.Generator):
        self.max_draft = max_draft
        self.alpha, self.beta = alpha, beta
        self.update = update
        # Drawn on the CPU once per drafted token: Python's generator is ten times cheaper than a tensor op.
        self._random = random.Random(int(torch.randint(2**62, (), generator=generator)))

    def stop(self, drafted: int) -> bool:
        theta = self._random.betavariate(self.alpha, self.beta)
        return drafted >= self.max_draft or self._random.random() >= theta

    def observe(self, drafted: int, accepted: int) -> None:
        tested = min(accepted + 1, drafted)
        right = accepted if self.update == "natural" else max(accepted - 1, 0)
        self.alpha += right
        self.beta += tested - right
