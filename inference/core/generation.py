"""One generation: its tokens, round by round, and their times."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from inference.core.stopwatch import Clock, Round


@dataclass(frozen=True)
class Generation:
    """One prompt continued by one method. `rounds` excludes the prefill; seconds are wall clock."""

    tokens: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    rounds: tuple[Round, ...] = ()
    totals: Mapping[str, float] = field(default_factory=dict)  # of the drafter (see `Structure.totals`)


def collect(rounds: Iterator[Round], clock: Clock = time.perf_counter) -> Generation:
    """Run a decoding generator to its end, timing prefill and decoding separately."""
    started = clock()
    first = next(rounds)
    prefilled = clock()
    rest = tuple(rounds)
    ended = clock()
    tokens = tuple(token for r in (first, *rest) for token in r.tokens)
    return Generation(tokens, prefilled - started, ended - prefilled, rest)
