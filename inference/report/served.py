"""What a serving engine makes of the drafters, beside what this runtime does; and which draft length pays there."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from inference.core.generation import Generation
from inference.measure.results import AUTOREGRESSIVE, PromptResult
from inference.measure.speed import speedup
from inference.measure.statistics import decode_statistics
from inference.measure.verdict import MIN_PROMPTS, verdict
from inference.report.wording import Report, busy_sentences, interval_text, number_text
from inference.settings.kinds import KINDS
from outrider.streams import Streams
from outrider.tables import Table

LARGEST_DIFFERENCE = 0.02  # of the acceptance at a depth, that is not spoken of
_DRAWS = 2000
PLAIN, DRAFTED = "plain", "drafted"  # the arms of an engine
Row = dict[str, Any]

SERVED = {
    "method": "how drafts were made",
    "requests": "at a time",
    "K": "tokens of a draft",
    "τ": "tokens of a pass of the target, in the engine",
    "τ here": "by this runtime, or of the table alone",
    "accepted by depth": "share of rounds whose draft was accepted so far, in the engine",
    "here": "the same by this runtime, or of the table alone; * where the engine differs by more than chance",
    "identical": "texts that equal the engine's own without a drafter; in brackets, those of it that equal the "
    "reference's",
    "tokens/s": "of all requests together, without a drafter and with it",
    "speed-up [95 %]": "of a request's decoding: the median over prompts",
    "verdict": "as above",
}


def served_row(
    method: str,
    drafted: int,
    results: Sequence[PromptResult],
    here: Sequence[Generation],
    references: Sequence[Sequence[int]] | None,
    totals: Mapping[str, float],
    load: Report,
    streams: Streams,
) -> Row:
    """The figures of a method in an engine at one concurrency, where its drafts have `drafted` tokens.

    results: of the engine; here: our own generations of the same prompts; references: the reference's texts, None if
    they are drawn. totals: by arm of the engine, its seconds for all prompts together. load: of the machine meanwhile.
    """
    own, plain = ([r.generations[arm] for r in results] for arm in (method, AUTOREGRESSIVE))
    both = [r for r in results if all(g.rounds for g in r.generations.values())]
    gained = speedup(both, method, AUTOREGRESSIVE, streams, after_first_step)
    return {
        "draft_tokens": drafted,
        "requests": len(results),
        "tau": decode_statistics(map(_whole, own))["tau"],
        "tau_here": decode_statistics(map(_whole, here))["tau"],
        "rounds": sum(max(0, len(g.rounds) - 1) for g in own),
        "acceptance": _compared((own, here), [r.unit for r in results], drafted, streams),
        "identical_to_plain": None if references is None else sum(r.identical(method) for r in results),
        "plain_identical_to_reference": None if references is None else sum(
            g.tokens == tuple(text) for g, text in zip(plain, references, strict=True)
        ),
        "tokens_per_second": {arm: sum(len(g.tokens) for g in made) / totals[arm] for arm, made in
                              ((PLAIN, plain), (DRAFTED, own))},
        "speedup": gained,
        "load": load,
        "verdict": verdict(gained, load["busy"]),
    }  # fmt: skip


def after_first_step(generation: Generation) -> float:
    """Seconds per token after the engine's first step, which reads the prompt and may already verify a draft."""
    return generation.decode_seconds / sum(len(r.tokens) for r in generation.rounds)


def _whole(generation: Generation) -> Generation:
    """It without its last round, which ends with the text: how much of its draft was right is not known."""
    return replace(generation, rounds=generation.rounds[:-1])


def _compared(sides: Sequence[Sequence[Generation]], units: Sequence[str], depth: int, streams: Streams) -> list[Row]:
    """By depth: the share of rounds accepted so far there and here, and the interval of the difference over prompts.

    sides: the generations there and here. units: of resampling, one for each of them.
    """
    places = {unit: place for place, unit in enumerate(dict.fromkeys(units))}
    counts = np.zeros((2, len(places), 1 + depth), np.int64)
    for side, generations in enumerate(sides):
        for unit, generation in zip(units, generations, strict=True):
            accepted = np.array([r.accepted for r in _whole(generation).rounds], np.int64)
            counts[side, places[unit]] += (accepted[:, None] >= np.arange(1 + depth)).sum(0)
    picks = streams.arrays("served").integers(counts.shape[1], size=(_DRAWS, counts.shape[1]))
    drawn = counts[:, picks].sum(2)  # [2, draws, 1 + K]
    shares, sampled = (part[..., 1:] / np.maximum(1, part[..., :1]) for part in (counts.sum(1), drawn))
    low, high = np.quantile(sampled[0] - sampled[1], (0.025, 0.975), axis=0)
    return [
        {
            "depth": place + 1,
            "served": float(shares[0, place]),
            "here": float(shares[1, place]),
            "difference_ci95": [float(low[place]), float(high[place])],
            "differs": bool(abs(shares[0, place] - shares[1, place]) > LARGEST_DIFFERENCE)
            and len(places) >= MIN_PROMPTS
            and not low[place] <= 0 <= high[place],
        }
        for place in range(depth)
    ]


def served_table(reports: Sequence[Report]) -> Table:
    """A row for every method and concurrency."""
    return Table(SERVED, [_cells(report["method"], row) for report in reports for row in report.get("served") or ()])


def _cells(method: str, row: Row) -> tuple[str, ...]:
    depths, speeds = row["acceptance"], row["tokens_per_second"]
    here = (f"{one['here']:.3f}{'*' * one['differs']}" for one in depths)
    equal = row["identical_to_plain"]
    return (
        method,
        str(row["concurrency"]),
        str(row["draft_tokens"]),
        *(f"{row[key]:.2f}" for key in ("tau", "tau_here")),
        " ".join(f"{one['served']:.3f}" for one in depths),
        " ".join(here),
        "" if equal is None else f"{equal}/{row['requests']} ({row['plain_identical_to_reference']})",
        " → ".join(number_text(speeds[arm]) for arm in (PLAIN, DRAFTED)),
        interval_text(row["speedup"]),
        row["verdict"],
    )


def served_lines(reports: Sequence[Report]) -> list[str]:
    """The engine's part of report.md; empty if none was asked for."""
    served = [report for report in reports if report.get("served")]
    if not served:
        return []
    lines = ["", f"## In {served[0]['served'][0]['engine']}", "", *served_table(served).markdown(), ""]
    lines += dict.fromkeys(words for report in served for row in report["served"] for words in busy_sentences(row))
    for report in served:
        for arm, judged in (report.get("served_judgement") or {}).items():
            lines.append(f"- {report['method']}, {arm}: of {judged['texts']} texts audited ({judged['file']}): "
                         f"{judged['verdict']}.")  # fmt: skip
        odd = {one["depth"] for row in report["served"] for one in row["acceptance"] if one["differs"]}
        schedule = report["served"][0]["options"].get("speculative_config")
        if odd and not schedule and KINDS[report["settings"]["source"]].served != "ngram":
            lines.append(
                f"- {report['method']}: the engine accepts otherwise than this runtime at depth {min(odd)}. One of "
                "them reads the drafter in another way (doctor=true says whether it is this one), or chooses drafted "
                "tokens in another way, as engines may where tokens are drawn."
            )
    return lines + schedule_lines(served)


def served_faults(report: Report) -> list[str]:
    """What is not the target's in the texts of a method that an engine drafted."""
    faults: list[str] = (report.get("served_judgement") or {}).get(DRAFTED, {}).get("faults", [])
    return faults


def schedule_lines(served: Sequence[Report]) -> list[str]:
    """Which draft length pays at which concurrency, by kind of drafter, and the engine's own option for it."""
    lines: list[str] = []
    for source in dict.fromkeys(report["settings"]["source"] for report in served):
        rows = [row for report in served if report["settings"]["source"] == source for row in report["served"]]
        if any(busy_sentences(row) or row["speedup"]["prompts"] < MIN_PROMPTS for row in rows):
            continue  # then nothing can be faster
        steps = schedule(rows)
        said = [f"{count if first == count else f'{first}–{count}'}: K = {k}" for first, count, k in steps]
        lines += ["", f"Draft lengths that pay for {source} by requests at a time: {', '.join(said)}."]
        if rows[0]["engine"].startswith("vllm") and any(k for *_, k in steps):
            option = {"num_speculative_tokens": max(k for *_, k in steps),
                      "num_speculative_tokens_per_batch_size": steps}  # fmt: skip
            lines += ["", "```", json.dumps(option), "```"]
    return lines


def schedule(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    """(first, last, K) by ranges of requests at a time: the K of the largest speed-up, 0 where none is faster.

    A range ends with a measured concurrency. Beyond the largest one nothing is known.
    """
    steps, first = [], 1
    for count in sorted({row["concurrency"] for row in rows}):
        faster = [row for row in rows if row["concurrency"] == count and row["verdict"] == "faster"]
        best = max(faster, key=lambda row: row["speedup"]["median"], default={"draft_tokens": 0})
        steps.append((first, count, int(best["draft_tokens"])))
        first = count + 1
    return steps
