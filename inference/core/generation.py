"""One text continued: its tokens, round by round, and the time they took."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inference.core.stopwatch import Clock


@dataclass(frozen=True)
class Round:
    """What one pass of the target committed. The first round of a generation is the prefill.

    tokens: committed ids, never beyond the first EOS or the budget.
    drafted: proposed tokens. accepted: how many of `tokens` came from the draft.
    depth: the draft's, so how many could have.

    Seconds are of the whole round and of its parts. draft: the drafter's forward passes. structure: everything else
    that the drafter does. verify: the target's pass and its transfer; in plain decoding the pass alone.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    depth: int
    seconds: float
    draft_seconds: float = 0.0
    structure_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass(frozen=True)
class Generation:
    """One prompt continued by one arm. `rounds` leaves the prefill out; seconds are wall clock."""

    tokens: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    rounds: tuple[Round, ...] = ()
    totals: Mapping[str, float] = field(default_factory=dict)  # of the drafter (see `Structure.totals`)


def collect(rounds: Iterator[Round], clock: Clock = time.perf_counter) -> Generation:
    """Run a decoding generator to its end, timing prefill and decoding apart."""
    started = clock()
    first = next(rounds)
    prefilled = clock()
    rest = tuple(rounds)
    ended = clock()
    tokens = tuple(token for r in (first, *rest) for token in r.tokens)
    return Generation(tokens, prefilled - started, ended - prefilled, rest)
