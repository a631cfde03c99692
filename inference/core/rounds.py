"""Rounds and generations: the tokens that they committed, and their times."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from outrider.inference.core.tree import DraftSource

Clock = Callable[[], float]


@dataclass(frozen=True)
class Round:
    """The tokens committed (made a part of the text) by one pass of the target. The first round of a generation is the
    prefill. In a batch, seconds include waits for other texts."""

    tokens: tuple[int, ...]  # committed ids, never beyond the first EOS or the budget
    drafted: int  # the number of proposed tokens
    accepted: int  # how many of `tokens` came from the draft
    depth: int  # of the draft: the largest possible `accepted`
    seconds: float  # of the whole round
    draft_seconds: float = 0.0  # of the drafter's forward passes
    structure_seconds: float = 0.0  # of the drafter's other work
    verify_seconds: float = 0.0  # of the target's pass and its transfer; in plain decoding of the pass alone
    source: DraftSource = field(default="", kw_only=True)  # who drafted; "": nobody, or it is not recorded


def synchronized_clock() -> float:
    """`time.perf_counter` after all queued work of the CUDA device has finished."""
    torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class Generation:
    """One prompt continued by one method; seconds are wall clock."""

    tokens: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    rounds: tuple[Round, ...] = ()  # without the prefill
    totals: Mapping[str, float] = field(default_factory=dict)  # the drafter's sums over rounds, by name


def collect(rounds: Iterator[Round], clock: Clock = time.perf_counter) -> Generation:
    """Run a decoding generator to its end, timing prefill and decoding separately."""
    start_time = clock()
    prefill_round, prefill_end = next(rounds), clock()
    later_rounds, decode_end = tuple(rounds), clock()
    tokens = tuple(token for r in (prefill_round, *later_rounds) for token in r.tokens)
    return Generation(tokens, prefill_end - start_time, decode_end - prefill_end, later_rounds)
