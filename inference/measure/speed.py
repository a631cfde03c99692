"""Timing statistics: speed-ups with confidence intervals, prefill times, and the parts of a token's time.

Turns of one conversation are correlated, and texts that were decoded together have the same rate. So the bootstrap
resamples whole conversations, or whole groups of texts. An arm is a way to decode: a method, or a baseline. A round is
one pass of the target.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation
from outrider.inference.measure import statistics
from outrider.inference.measure.results import PromptResult
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS


def decoding(generation: Generation) -> float:
    """Seconds per decoded token, without the prefill and its token."""
    return generation.decode_seconds / (len(generation.tokens) - 1)


def end_to_end(generation: Generation) -> float:
    """Seconds per token of the whole answer: the prefill, including the drafter's, and decoding."""
    return (generation.prefill_seconds + generation.decode_seconds) / len(generation.tokens)


def select_timed(results: Sequence[PromptResult], *arms: str) -> list[PromptResult]:
    """Results in which every given arm decoded at least one token after the prefill."""
    return [r for r in results if all(len(r.generations[arm].tokens) > 1 for arm in arms)]


def without_loops(results: Sequence[PromptResult], *arms: str) -> list[PromptResult]:
    """Results without a loop (a text that repeats a cycle of tokens) in these arms. Texts that were decoded together
    share a pace, so a group with a loop is left out as a whole."""
    loop_flags = [any(statistics.loop_length(r.generations[arm].tokens) for arm in arms) for r in results]
    looped_groups = {r.group for r, looped in zip(results, loop_flags, strict=True) if looped and r.group is not None}
    return [r for r, looped in zip(results, loop_flags, strict=True) if not looped and r.group not in looped_groups]


def speedups(results: Sequence[PromptResult], arm: str, baseline: str) -> dict[str, float]:
    """Per prompt: the baseline's seconds per decoded token over the arm's, if both decoded tokens."""
    return {r.prompt_id: _ratio(r, arm, baseline, decoding) for r in select_timed(results, arm, baseline)}


def speedup(
    results: Sequence[PromptResult],
    arm: str,
    baseline: str,
    streams: Streams,
    seconds: Callable[[Generation], float] = decoding,
) -> statistics.MedianInterval:
    """Median and interval of the baseline's `seconds` over the arm's, over prompts for which both decoded tokens."""
    timed_results = select_timed(results, arm, baseline)
    names = (arm, baseline, seconds.__name__)
    return median_of(timed_results, [_ratio(r, arm, baseline, seconds) for r in timed_results], streams.within(*names))


def speedups_over_baselines(
    results: Sequence[PromptResult], arm: str, streams: Streams, seconds_of: Callable[[Generation], float] = decoding
) -> statistics.MedianInterval:
    """`speedup` over plain decoding and, if it was run, over transformers' `generate`."""
    over_plain = speedup(results, arm, AUTOREGRESSIVE, streams, seconds_of)
    if TRANSFORMERS not in results[0].generations:
        return over_plain
    return replace(over_plain, vs_transformers_generate=speedup(results, arm, TRANSFORMERS, streams, seconds_of))


def prefill_seconds(results: Sequence[PromptResult], arm: str, streams: Streams) -> statistics.MedianInterval | None:
    """Median and interval of the seconds before an arm's first token; None for an arm that was not run."""
    if arm not in results[0].generations:
        return None
    return median_of(results, [r.generations[arm].prefill_seconds for r in results], streams.within(arm, "prefill"))


def tokens_per_second(results: Sequence[PromptResult], arm: str, *, prefill: bool = False) -> float | None:
    """Decoded tokens per second over all prompts; None for an arm without any. prefill: with its time and token."""
    generations = [r.generations[arm] for r in results if arm in r.generations]
    timed_generations = [g for g in generations if prefill or len(g.tokens) > 1]
    total_seconds = sum(g.decode_seconds + prefill * g.prefill_seconds for g in timed_generations)
    return sum(len(g.tokens) - (not prefill) for g in timed_generations) / total_seconds if total_seconds else None


def parts_of_time(results: Sequence[PromptResult], arm: str) -> dict[str, float]:
    """Seconds of decoding by part of a round over all prompts, of the arm's profile if there is one: a run whose clock
    waits for the device (CUDA). structure: the drafter's work outside its passes; other: time outside the parts."""
    generations = [r.profiles.get(arm, r.generations[arm]) for r in results]
    rounds = [r for g in generations for r in g.rounds]
    part_seconds = {
        "draft": sum(r.draft_seconds for r in rounds),
        "verify": sum(r.verify_seconds for r in rounds),
        "structure": sum(r.structure_seconds for r in rounds),
    }
    return {**part_seconds, "other": sum(g.decode_seconds for g in generations) - sum(part_seconds.values())}


def time_of_a_plain_token(results: Sequence[PromptResult]) -> statistics.PlainToken:
    """The time of a token over all rounds of the autoregressive arm."""
    part_seconds = parts_of_time(results, AUTOREGRESSIVE)
    round_count = sum(len(r.profiles.get(AUTOREGRESSIVE, r.generations[AUTOREGRESSIVE]).rounds) for r in results)
    if not round_count:
        return statistics.PlainToken()
    total_seconds, pass_seconds = sum(part_seconds.values()), part_seconds["verify"]
    token_us, pass_us = 1e6 * total_seconds / round_count, 1e6 * pass_seconds / round_count
    return statistics.PlainToken(token_us, pass_us, token_us - pass_us, 1 - pass_us / token_us)


def break_even(results: Sequence[PromptResult], method: str) -> float | None:
    """The acceptance rate at which this method is as fast as plain decoding; None if no drafted token was tested.

    A round with k tested tokens that takes s seconds emits 1 + v·k tokens; plain decoding takes t seconds a token.
    The two are equally fast at v = (s/t − 1)/k, and over n rounds at v = (Σs/t − n)/Σk.
    """
    timed_results = select_timed(results, method, AUTOREGRESSIVE)
    rounds = [r for result in timed_results for r in result.generations[method].rounds]
    if not (n_tested := statistics.count_tested(rounds)):
        return None
    plain_tokens = sum(len(result.generations[AUTOREGRESSIVE].tokens) - 1 for result in timed_results)
    token_seconds = sum(result.generations[AUTOREGRESSIVE].decode_seconds for result in timed_results) / plain_tokens
    method_seconds = sum(result.generations[method].decode_seconds for result in timed_results)
    return (method_seconds / token_seconds - len(rounds)) / n_tested


def conversations(results: Sequence[PromptResult]) -> int:
    """The number of conversations to which these results belong."""
    return len({r.talk for r in results})


def _ratio(result: PromptResult, arm: str, baseline: str, seconds_of: Callable[[Generation], float]) -> float:
    return seconds_of(result.generations[baseline]) / seconds_of(result.generations[arm])


def median_of(results: Sequence[PromptResult], values: Sequence[float], streams: Streams) -> statistics.MedianInterval:
    """The median of `values`, one per result, and its interval, resampled by `PromptResult.unit`, the conversation or
    group; `prompts` of the result is the number of units."""
    if not values:
        return statistics.MedianInterval()
    median, interval = statistics.bootstrap_median(values, streams.arrays(), units=[r.unit for r in results])
    return statistics.MedianInterval(median, interval, len({r.unit for r in results}))
