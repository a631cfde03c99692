"""What the entries of a record (bench_real.py) are made of, prompt by prompt, in FILE.raw.json.gz beside FILE.json.

By entry, its conditions and its prompts. A prompt has its id and category, the unit that is resampled, its number of
tokens, the deviations of arms that were judged, and of every arm a digest of the text, the number of its tokens, the
seconds of prefill and of decoding, and of every round the tokens emitted, drafted and accepted, the draft's depth, and
(in newer records) its source.
"""

import gzip
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from outrider.base.files import digest_of, write_atomically
from outrider.base.settings import construct
from outrider.base.streams import Streams
from outrider.inference.core.rounds import Generation, Round
from outrider.inference.measure.lossless import Deviation, judge_deviations
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.speed import (
    end_to_end,
    prefill_seconds,
    speedup,
    speedups_over_baselines,
    tokens_per_second,
)
from outrider.inference.measure.statistics import acceptance_by_position, bootstrap_median, decode_statistics
from outrider.inference.report.types import to_json

PLAIN = "outrider"  # the arm of bench_batch.py that the others are compared with
Json = dict[str, Any]


def raw_file(record: Path) -> Path:
    """Where the raw data of a record lie."""
    return record.with_suffix(".raw.json.gz")


def read_raw(path: Path) -> dict[str, Json]:
    """The raw data by entry; none where there is no such file."""
    found: dict[str, Json] = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}
    return found


def write_raw(path: Path, name: str, raw: Json) -> None:
    """Write the raw data of an entry, in the place of earlier ones of this name; the same data make the same file."""
    write_atomically(path, gzip.compress(json.dumps({**read_raw(path), name: raw}).encode(), mtime=0))


def packed(result: PromptResult) -> Json:
    """A prompt's result, JSON-able, without its texts."""
    arms = {
        name: {
            "text": digest_of([*made.tokens])[:12],
            "tokens": len(made.tokens),
            "prefill_seconds": made.prefill_seconds,
            "decode_seconds": made.decode_seconds,
            "rounds": [[len(r.tokens), r.drafted, r.accepted, r.depth, r.source] for r in made.rounds],
        }
        for name, made in result.generations.items()
    }
    judged = {name: asdict(one) for name, one in result.deviations.items()}
    own = {"id": result.prompt_id, "category": result.category, "unit": digest_of(result.unit)[:12]}
    return {**own, "tokens": len(result.prompt), "reference": result.reference, "arms": arms, "deviations": judged}


def unpacked(raw: Json) -> PromptResult:
    """The result that was `packed`, with texts of the same lengths, which are equal where they were."""

    def made(one: Json) -> Generation:
        rounds = tuple(Round((0,) * emitted, *counts[:3], seconds=0.0) for emitted, *counts in one["rounds"])
        text = (int(one["text"], 16),) * one["tokens"]
        return Generation(text, one["prefill_seconds"], one["decode_seconds"], rounds)

    return PromptResult(
        raw["id"], raw["category"], (0,) * raw["tokens"], {name: made(one) for name, one in raw["arms"].items()},
        raw["reference"], deviations={name: construct(Deviation, one) for name, one in raw["deviations"].items()},
        group=raw["unit"],
    )  # fmt: skip


def entry_of(raw: Json) -> Json:
    """An entry of a record, from its raw data alone: bench_real.py writes it, fill_tables.py compares it."""
    conditions, results = raw["conditions"], [unpacked(one) for one in raw["prompts"]]
    counts = {"prompts": len(results), "prompt_tokens": sum(len(result.prompt) for result in results)}
    return {**conditions, **counts, "arms": figures_of_arms(results, conditions["seed"])}


def figures_of_arms(results: Sequence[PromptResult], seed: int) -> dict[str, Json]:
    """`figures` of every arm, of all prompts and `by_category`, also over the arm of most tokens/s; its judgement."""
    groups = {name: [one for one in results if one.category == name] for name in sorted({r.category for r in results})}
    fastest = max(results[0].generations, key=lambda arm: tokens_per_second(results, arm) or 0.0)

    def beside(group: Sequence[PromptResult], arm: str) -> Json:
        over = speedup(group, arm, fastest, Streams(seed).within(arm, "bootstrap"))
        return {**figures(group, arm, seed), "over_fastest": to_json(over)}

    found = {}
    for arm in results[0].generations:
        judged = [result.deviations[arm] for result in results if arm in result.deviations]
        found[arm] = {
            **beside(results, arm),
            "judged": asdict(judge_deviations(judged)) if judged else None,
            "by_category": {name: beside(group, arm) for name, group in groups.items()},
        }
    return found


def figures(results: Sequence[PromptResult], arm: str, seed: int) -> Json:
    """The figures of one arm by `results`: speeds of decoding without prefill; ratios as medians over prompts with 95 %
    intervals. τ is None for an arm that does not report its passes."""
    mine = [result.generations[arm] for result in results]
    streams = Streams(seed).within(arm, "bootstrap")
    rounds = [each for generation in mine for each in generation.rounds]
    counted = asdict(decode_statistics(mine)) if any(each.drafted for each in rounds) else {}
    return {
        "prompts": len(results),
        "tokens": sum(len(generation.tokens) for generation in mine),
        "identical": sum(result.identical(arm) for result in results),
        "tokens_per_second": tokens_per_second(results, arm),
        "tau": sum(len(each.tokens) for each in rounds) / len(rounds) if rounds else None,
        **counted,
        "prefill_seconds": to_json(prefill_seconds(results, arm, streams)),
        "speedup": to_json(speedups_over_baselines(results, arm, streams)),
        "end_to_end": to_json(speedups_over_baselines(results, arm, streams, end_to_end)),
    }


def of_requests(turns: Sequence[Mapping[str, Any]]) -> Json:
    """The figures of an arm of commit 7fd0e04c's bench_batch.py with so many requests in flight, of its turns."""
    counts = [count for turn in turns for count in turn["texts"].values()]
    seconds = {name: [one for turn in turns for one in turn[name]] for name in ("first", "whole")}
    return {
        "tokens_per_second": statistics.median(turn["rate"] for turn in turns),
        "requests": len(counts),
        "tokens": sum(counts),
        **{f"{name}_seconds": {"median": statistics.median(every), "p95": float(np.quantile(every, 0.95))}
           for name, every in seconds.items()},
    }  # fmt: skip


def of_arm(turns: Sequence[Json], plain: Sequence[Json]) -> Json:
    """The figures of one arm with so many in flight, from its turns and those of the plain arm.

    tokens_per_second: of all requests together, with the prefill. decoding: of one request, after its first step.
    over_plain: how many times as fast as the plain arm an answer is, per token: the median of all prompts.
    """
    said, its = ([one for turn in arm for one in turn["requests"]] for arm in (turns, plain))
    by = {one["prompt"]: one for one in its}
    costs = [[one["whole"] / one["tokens"] for one in (by[mine["prompt"]], mine)] for mine in said]
    median, interval = bootstrap_median([cost / own for cost, own in costs], Streams(0).within("requests").arrays())
    rates = [sum(one["tokens"] for one in turn["requests"]) / turn["seconds"] for turn in turns]
    seconds = {name: [one[name] for one in said] for name in ("first", "whole")}
    return {
        "tokens_per_second": statistics.median(rates),
        "decoding": sum(one["later"] for one in said) / sum(one["whole"] - one["first"] for one in said),
        "over_plain": {"median": median, "ci95": interval},
        "requests": len(said),
        "tokens": sum(one["tokens"] for one in said),
        "identical": sum(one["text"] == by[one["prompt"]]["text"] for one in said),
        **{f"{name}_seconds": {"median": statistics.median(every), "p95": float(np.quantile(every, 0.95))}
           for name, every in seconds.items()},
    }  # fmt: skip


def figures_of_requests(entry: Mapping[str, Any]) -> dict[str, dict[str, Json]]:
    """The `of_arm` of every arm that had all turns, by its name and the requests in flight."""
    of: dict[str, dict[int, list[Json]]] = {}
    for turn in entry["turns"]:
        of.setdefault(turn["arm"], {}).setdefault(turn["in_flight"], []).append(turn)
    whole = {name: own for name, own in of.items() if all(len(one) == entry["parts"] for one in own.values())}
    return {name: {str(count): of_arm(turns, whole[PLAIN][count]) for count, turns in own.items()}
            for name, own in whole.items() if PLAIN in whole}  # fmt: skip


def judged_trainers(arms: Mapping[str, Json]) -> dict[str, Json]:
    """Every trainer with τ and acceptance, and its τ - 1 over ours of the same kind; intervals are over prompts. Of a
    prompt `rounds` has every round's tokens, depth of the draft and accepted tokens."""
    found, count = {name: {**arm} for name, arm in arms.items()}, len(next(iter(arms.values()))["rounds"])
    picked = np.vstack([np.arange(count), np.random.default_rng(0).integers(count, size=(2000, count))])
    gains = dict[str, Any]()
    for name, arm in arms.items():
        told = np.array([[sum(tokens for tokens, *_ in text), len(text)] for text in arm["rounds"]])[picked].sum(1)
        gains[name] = told[:, 0] / told[:, 1] - 1  # the first one is of all prompts
        rounds = tuple(Round((), depth, done, depth, 0.0) for text in arm["rounds"] for _, depth, done in text)
        found[name]["accepted"] = [
            depth.accepted for depth in acceptance_by_position([Generation((), 0.0, 0.0, rounds)])
        ]
    for name, gain in gains.items():
        ratio = gain / np.maximum(gains.get("outrider_eagle3" if "eagle3" in name else "outrider", gain), 1e-9)
        for key, drawn in (("tau", 1 + gain), ("gain_over_ours", ratio)):
            low, high = np.quantile(drawn[1:], [0.025, 0.975])
            found[name][key] = {"value": float(drawn[0]), "ci95": [float(low), float(high)]}
    return found
