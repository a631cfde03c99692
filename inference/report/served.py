"""A serving engine's results with the drafters beside this runtime's, and the draft length that pays there."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.base.streams import Streams
from outrider.base.words import figure
from outrider.inference.core.rounds import Generation
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.speed import speedup, without_loops
from outrider.inference.measure.statistics import MIN_PROMPTS, decode_statistics, share_of_loops, verdict
from outrider.inference.report.tables import Report, served_table
from outrider.inference.report.wording import busy_sentences, judged_speed
from outrider.inference.settings.kinds import EAGLE3, KINDS
from outrider.inference.settings.method import AUTOREGRESSIVE

LARGEST_DIFFERENCE = 0.02  # differences of acceptance at a depth up to this are not reported
_DRAWS = 2000
PLAIN, DRAFTED = "plain", "drafted"  # the arms of an engine
UNREAD = "unread"  # in a generation's totals: its text has another tokenisation, so the ids it was sent as are unknown
_USUAL = 3  # tokens of a draft
Row = dict[str, Any]
Counts = npt.NDArray[np.int64]
Counted = Sequence[tuple[Sequence[int] | None, int]]
Texts = Sequence[Generation]


def served_row(
    method: str,
    drafted: int,
    results: Sequence[PromptResult],
    here: Sequence[Generation],
    references: Sequence[Sequence[int]] | None,
    totals: Mapping[str, float],
    load: Report,
    streams: Streams,
    counted: Counted = (),
) -> Row:
    """The figures of a method in an engine at one concurrency, where its drafts have `drafted` tokens.

    results: of the engine; here: our own generations of the same prompts; references: the reference's texts, None if
    they are drawn. totals: by arm of the engine, its seconds for all prompts together. load: of the machine meanwhile.
    counted: the `counts` (see `EngineServer`) of the next prompts, None where rounds are seen, and how many these are.
    """
    arms = {arm: name for arm, name in ((PLAIN, AUTOREGRESSIVE), (DRAFTED, method)) if arm in totals}
    by_arm = {arm: [r.generations[name] for r in results] for arm, name in arms.items()}
    pairs = [r for r in results if PLAIN in arms and all(g.rounds for g in r.generations.values())]
    gained, judged = (speedup(texts, method, AUTOREGRESSIVE, streams, after_first_step)
                      for texts in (pairs, without_loops(pairs, method, AUTOREGRESSIVE)))  # fmt: skip
    same = {arm: references and sum(g.tokens == tuple(ids) for g, ids in zip(texts, references, strict=True))
            for arm, texts in by_arm.items()}  # fmt: skip
    flags = [name for texts in by_arm.values() for g in texts for name in g.totals]
    return {
        "draft_tokens": drafted,
        "requests": len(results),
        **_acceptance(by_arm[DRAFTED], here, [r.unit for r in results], counted, drafted, streams),
        "tau_here": decode_statistics(map(_without_last, here))["tau"],
        "identical_to_plain": sum(r.identical(method) for r in results) if same.get(PLAIN) is not None else None,
        "plain_identical_to_reference": same.get(PLAIN),
        "identical_to_reference": same[DRAFTED],
        **{name: flags.count(name) for name in ("retokenised", UNREAD)},
        "tokens_per_second": {arm: sum(len(g.tokens) for g in texts) / totals[arm] for arm, texts in by_arm.items()},
        "seconds_per_token": {arm: sum(g.decode_seconds for g in texts) / max(1, sum(
            len(r.tokens) for g in texts for r in g.rounds)) for arm, texts in by_arm.items()},
        "loops": {arm: share_of_loops([g.tokens for g in texts]) for arm, texts in by_arm.items()},
        "speedup": gained,
        "speedup_without_loops": judged,
        "load": load,
        "verdict": verdict(judged, load["busy"]),
    }  # fmt: skip


def after_first_step(generation: Generation) -> float:
    """Seconds per token after the engine's first step, which reads the prompt and may already verify a draft."""
    return generation.decode_seconds / sum(len(r.tokens) for r in generation.rounds)


def _without_last(generation: Generation) -> Generation:
    """The generation without its last round: the text ended within that draft, so its acceptance is unknown."""
    return replace(generation, rounds=generation.rounds[:-1])


def _acceptance(texts: Texts, here: Texts, units: Sequence[str], counted: Counted, depth: int, streams: Streams) -> Row:
    """τ, rounds and acceptance by depth, None for what is unknown.

    A server's counters include the last rounds of texts, so larger differences are allowed.
    """
    there, local, rows = _depths(texts, depth), _depths(here, depth), [row for row, _ in counted if row is not None]
    if not rows:
        tau, compared = decode_statistics(map(_without_last, texts))["tau"], _compared(there, local, units, streams)
        return {"tau": tau, "rounds": int(there[:, 0].sum()), "acceptance": compared}
    if any(len(row) != 1 + depth for row in rows):  # older runs have other counts of llama.cpp
        return {"tau": None, "rounds": None, "acceptance": []}
    edges = [*accumulate((many for _, many in counted), initial=0)]
    there, local = (np.add.reduceat(side, edges[:-1]) for side in (there, local))
    there[[row is not None for row, _ in counted]] = rows
    rounds, accepted = int(there[:, 0].sum()), int(there[:, 1:].sum())
    groups = [" ".join(units[start:end]) for start, end in pairwise(edges)]
    compared = _compared(there, local, groups, streams, len(texts) / max(1, rounds))
    return {"tau": 1 + accepted / max(1, rounds), "rounds": rounds, "acceptance": compared}


def _depths(generations: Iterable[Generation], depth: int) -> Counts:
    """[n, 1 + depth]: for each generation the number of whole rounds, and how many of them accepted 1, 2, … tokens."""
    accepted = [np.array([r.accepted for r in _without_last(g).rounds], np.int64) for g in generations]
    return np.array([(lengths[:, None] >= np.arange(1 + depth)).sum(0) for lengths in accepted])


def _compared(there: Counts, here: Counts, units: Sequence[str], streams: Streams, more: float = 0.0) -> list[Row]:
    """By depth: the share of rounds accepted so far there and here, and the interval of the difference over units.

    there, here [n, 1 + depth]: see `_depths`. units: of resampling, one for each of n. more: additional tolerance.
    """
    rows = {unit: row for row, unit in enumerate(dict.fromkeys(units))}
    counts = np.zeros((2, len(rows), there.shape[1]), np.int64)
    for side, side_counts in enumerate((there, here)):
        np.add.at(counts[side], [rows[unit] for unit in units], side_counts)
    picks = streams.arrays("served").integers(counts.shape[1], size=(_DRAWS, counts.shape[1]))
    drawn = counts[:, picks].sum(2)  # [2, draws, 1 + K]
    shares, sampled = (part[..., 1:] / np.maximum(1, part[..., :1]) for part in (counts.sum(1), drawn))
    low, high = np.quantile(sampled[0] - sampled[1], (0.025, 0.975), axis=0)
    return [
        {
            "depth": i + 1,
            "served": float(shares[0, i]),
            "here": float(shares[1, i]),
            "difference_ci95": [float(low[i]), float(high[i])],
            "differs": bool(abs(shares[0, i] - shares[1, i]) > LARGEST_DIFFERENCE + more)
            and len(rows) >= MIN_PROMPTS
            and not low[i] <= 0 <= high[i],
        }
        for i in range(shares.shape[1])
    ]


def served_lines(reports: Sequence[Report]) -> list[str]:
    """The engine's part of report.md; empty without an engine."""
    served = [report for report in reports if report.get("served")]
    if not served:
        return []
    lines = [f"## In {served[0]['served'][0]['engine']}", "", *served_table(served).markdown(), ""]
    lines += dict.fromkeys(words for report in served for row in report["served"] for words in busy_sentences(row))
    for report in served:
        for arm, judged in (report.get("served_judgement") or {}).items():
            lines.append(f"- {report['method']}, {arm}: of {judged['texts']} texts audited ({judged['file']}): "
                         f"{judged['verdict']}.")  # fmt: skip
        again = [sum(row[name] for row in report["served"]) for name in ("retokenised", UNREAD)]
        if any(again):
            lines.append(f"- {report['method']}: {again[0]} texts came without token ids and were tokenised again; "
                         f"{again[1]} of them are not tokenised so, and not audited.")  # fmt: skip
        odd = {share["depth"] for row in report["served"] for share in row["acceptance"] if share["differs"]}
        schedule = report["served"][0]["options"].get("speculative_config")
        if odd and not schedule and KINDS[report["settings"]["source"]].served != "ngram":
            lines.append(
                f"- {report['method']}: the engine accepts otherwise than this runtime at depth {min(odd)}. "
                "One of them reads the drafter in another way (doctor=true says whether it is this one), or chooses "
                "drafted tokens in another way, as engines may where tokens are drawn."
            )
    return lines + schedule_lines(served)


def served_faults(report: Report) -> list[str]:
    """The faults in the texts that an engine wrote with a method's drafter."""
    return list((report.get("served_judgement") or {}).get(DRAFTED, {}).get("faults", []))


def schedule_lines(served: Sequence[Report]) -> list[str]:
    """Which draft length pays at which concurrency, by kind of drafter, and the engine's own option for it."""
    lines: list[str] = []
    for kind in dict.fromkeys(report["settings"]["source"] for report in served):
        rows = [row for report in served if report["settings"]["source"] == kind for row in report["served"]]
        if any(busy_sentences(row) or judged_speed(row)["prompts"] < MIN_PROMPTS for row in rows):
            continue  # then nothing can be faster
        steps, lengths = schedule(rows), sorted({row["draft_tokens"] for row in rows})
        usual = _USUAL if _USUAL in lengths else lengths[len(lengths) // 2]
        medians = {(row["concurrency"], row["draft_tokens"]): judged_speed(row)["median"] for row in rows}
        ranges = [f"{count if first == count else f'{first}–{count}'}: K = {k}" for first, count, k in steps]
        gains = [f"{medians.get((count, k), 1) / medians[count, usual]:.2f}× at {count}" for _, count, k in steps]
        lines += ["", f"Draft lengths that pay for {kind} by requests at a time: {', '.join(ranges)}. Over K = {usual} "
                  f"everywhere this gains {', '.join(gains)}, on these prompts.", "", *_expected(rows)]  # fmt: skip
        option: Row = {"num_speculative_tokens": max(k for *_, k in steps),
                       "num_speculative_tokens_per_batch_size": steps}  # fmt: skip
        if kind == EAGLE3.name and rows[0]["engine"].startswith("sglang"):  # --speculative-adaptive-config
            option = {str(first): {"candidate_steps": [k]} for first, _, k in steps}
        elif not rows[0]["engine"].startswith("vllm"):
            continue
        lines += ["", "```", json.dumps(option), "```"] if any(k for *_, k in steps) else []
    return lines


def _expected(rows: Sequence[Row]) -> Iterator[str]:
    """By requests at a time: the speed-up to expect of each draft length from the shortest to the longest measured one.

    A step of K drafted tokens emits 1 + Σ a_d tokens, d ≤ K, where a_d is the share of rounds that accepted d tokens.
    Its time is τ times that of a token, in steps without a drafter; interpolated between measured lengths.
    """
    lengths = sorted({row["draft_tokens"] for row in rows})
    if len(lengths) < 2 or not all(row["rounds"] and len(row["acceptance"]) == row["draft_tokens"] for row in rows):
        return
    shares = [_share(rows, i) for i in range(lengths[-1])]
    for count in sorted({row["concurrency"] for row in rows}):
        row_of = {row["draft_tokens"]: row for row in rows if row["concurrency"] == count}
        costs = [row_of[k]["tau"] * row_of[k]["seconds_per_token"][DRAFTED] / row_of[k]["seconds_per_token"][PLAIN]
                 for k in lengths]  # fmt: skip
        gains = [f"K = {k} {(1 + sum(shares[:k])) / np.interp(k, lengths, costs):.2f}×"
                + (f" ({figure(row_of[k]['speedup'])})" if k in row_of else "")
                for k in range(lengths[0], lengths[-1] + 1)]  # fmt: skip
        yield (f"- {count} at a time, the speed-up expected of acceptance and seconds of a step (measured): "
               f"{', '.join(gains)}.")  # fmt: skip


def _share(rows: Sequence[Row], index: int) -> float:
    """The share of rounds that accepted the token at this place, among rounds that drafted so far."""
    long = [row for row in rows if row["draft_tokens"] > index]
    return sum(row["rounds"] * row["acceptance"][index]["served"] for row in long) / sum(row["rounds"] for row in long)


def schedule(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    """(first, last, K) by ranges of requests at a time: the K of the largest speed-up, 0 where none is faster.

    A range ends with a measured concurrency. Beyond the largest one nothing is known.
    """
    steps, first = [], 1
    for count in sorted({row["concurrency"] for row in rows}):
        faster = [row for row in rows if row["concurrency"] == count and row["verdict"] == "faster"]
        best = max(faster, key=lambda row: judged_speed(row)["median"], default={"draft_tokens": 0})
        steps.append((first, count, int(best["draft_tokens"])))
        first = count + 1
    return steps
