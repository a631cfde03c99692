"""The figures of arms that were measured in turn, in all and by category."""

from collections.abc import Sequence
from typing import Any

from outrider.base.streams import Streams
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.speed import end_to_end, prefill_seconds, speedups_over_baselines, tokens_per_second
from outrider.inference.measure.statistics import decode_statistics
from outrider.inference.report.lossless import lossless_section

Figures = dict[str, Any]


def figures(results: Sequence[PromptResult], arm: str, seed: int) -> Figures:
    """The figures of one arm by `results`: speeds of decoding without prefill; ratios as medians over prompts with 95 %
    intervals. τ is None for an arm that does not report its passes."""
    mine = [result.generations[arm] for result in results]
    streams = Streams(seed).within(arm, "bootstrap")
    rounds = [each for generation in mine for each in generation.rounds]
    statistics = decode_statistics(mine) if any(each.drafted for each in rounds) else {}
    return {
        "prompts": len(results),
        "tokens": sum(len(generation.tokens) for generation in mine),
        "identical": sum(result.identical(arm) for result in results),
        "tokens_per_second": tokens_per_second(results, arm),
        "tau": sum(len(each.tokens) for each in rounds) / len(rounds) if rounds else None,
        **statistics,
        "prefill_seconds": prefill_seconds(results, arm, streams),
        "speedup": speedups_over_baselines(results, arm, streams),
        "end_to_end": speedups_over_baselines(results, arm, streams, end_to_end),
    }


def all_figures(results: Sequence[PromptResult], seed: int) -> dict[str, Figures]:
    """`figures` of every arm by name, over all prompts and `by_category`, and its judgement, if it was judged."""
    categories = sorted({result.category for result in results})
    groups = {name: [result for result in results if result.category == name] for name in categories}
    found = {}
    for arm in results[0].generations:
        judged = lossless_section(results, arm, sampled=False)["judged"][arm]
        parts = {name: figures(group, arm, seed) for name, group in groups.items()}
        found[arm] = {**figures(results, arm, seed), "judged": judged, "by_category": parts}
    return found
