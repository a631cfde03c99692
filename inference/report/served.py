"""A serving engine's results beside this runtime's, and the draft length that pays there.

    served_row       an `EngineRun`, one method at one concurrency, becomes the figures of a `ServedRow`
    served_lines     the engine's part of report.md: the table, notes, and `schedule_lines`
    choose_lengths   which draft length K pays for how many requests at a time

K is the number of tokens of a draft. "Here" means this runtime, or for an n-gram table the table alone. The arms are
`PLAIN`, the engine without a drafter, and `DRAFTED`, the engine with the drafter of a method. A text loops if it
repeats a cycle of tokens. Figures are resampled by units: conversations, or groups of texts that were decoded together.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from outrider.base.streams import Streams
from outrider.base.words import Columns, Table, escape_controls, fill_table, format_figure
from outrider.inference.core.rounds import Generation
from outrider.inference.measure.results import PromptResult
from outrider.inference.measure.speed import speedup, without_loops
from outrider.inference.measure.statistics import MIN_PROMPTS, MachineLoad, count_loops, decode_statistics, judge_speed
from outrider.inference.report.tables import METHODS
from outrider.inference.report.types import DRAFTED, NOT_LOSSLESS, PLAIN, UNREAD, DepthShare, MethodReport, ServedRow
from outrider.inference.settings.kinds import EAGLE3, KINDS
from outrider.inference.settings.method import AUTOREGRESSIVE

LARGEST_DIFFERENCE = 0.02  # differences of acceptance at a depth up to this are not reported
_DRAWS = 2000  # of the bootstrap
_USUAL_LENGTH = 3  # K that engines have by default
RoundCounts = npt.NDArray[np.int64]  # [n, 1 + K]: the rounds, then those that accepted at least 1, 2, … K tokens
ServerCounts = Sequence[tuple[Sequence[int] | None, int]]  # by block of prompts: such counts or None, number of prompts
Texts = Sequence[Generation]
SERVED: Columns = {
    "method": ("{method}", "how drafts were made"),
    "requests": ("{concurrency}", "at a time"),
    "K": ("{draft_tokens}", "tokens of a draft"),
    "τ": ("{tau:.2f}", "tokens of a pass of the target, in the engine"),
    "τ here": ("{tau_here:.2f}", "by this runtime, or of the table alone"),
    "accepted by depth": (
        "{there}",
        "share of rounds accepted so far, in the engine; or of drafted tokens, if it says no more",
    ),
    "here": (
        "{here}",
        "the same by this runtime, or of the table alone; * where the engine differs by more than chance",
    ),
    "identical": (
        "{identical}",
        "texts that equal the engine's own without a drafter; in brackets, those of it "
        "(without it, those with a drafter) that equal the reference's",
    ),
    "tokens/s": ("{tokens}", "of all requests together, without a drafter and with it"),
    "ms/token": ("{spent}", "of a request after its first step, without a drafter and with it"),
    "speed-up [95 %]": ("{speedup:interval}", "of a request's decoding: the median over prompts"),
    "without loops [95 %]": METHODS["without loops [95 %]"],
    "verdict": ("{verdict}", "as above"),
}


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What an engine did with a method's drafts of `drafted` tokens, at one concurrency.

    concurrency: requests at a time. results: of the engine. here: this runtime's generations of the same prompts.
    references: for these prompts the texts of transformers or, if it did not run, of plain decoding here; None if texts
    are drawn. load: of the machine meanwhile.
    totals: by arm of the engine, its seconds for all prompts together. counts: what a server counted of each block of
    prompts, which were sent together; None where the server's rounds are seen.
    """

    engine: str
    options: Mapping[str, object] = field(default_factory=dict)
    concurrency: int
    method: str
    drafted: int
    results: Sequence[PromptResult]
    here: Sequence[Generation]
    references: Sequence[Sequence[int]] | None
    totals: Mapping[str, float]
    load: MachineLoad
    counts: ServerCounts = ()


def served_row(run: EngineRun, random_streams: Streams) -> ServedRow:
    """The figures of a run. A speed-up is of the prompts of which both arms decoded a step after the first."""
    method, results, arm_seconds, references = run.method, run.results, run.totals, run.references
    arms = {arm: name for arm, name in ((PLAIN, AUTOREGRESSIVE), (DRAFTED, method)) if arm in arm_seconds}
    by_arm = {arm: [r.generations[name] for r in results] for arm, name in arms.items()}
    paired_results = [r for r in results if PLAIN in arms and all(g.rounds for g in r.generations.values())]
    over_plain, loopless_speedup = (
        speedup(texts, method, AUTOREGRESSIVE, random_streams, after_first_step)
        for texts in (paired_results, without_loops(paired_results, method, AUTOREGRESSIVE))
    )
    matches = {arm: None if references is None else _count_equal(texts, references) for arm, texts in by_arm.items()}
    # Flags in `totals` of a server's text: retokenised (ids were made of the text), UNREAD (the server's are unknown).
    flag_names = [name for texts in by_arm.values() for g in texts for name in g.totals]
    tau, round_count, depth_shares = _acceptance(by_arm[DRAFTED], run, random_streams)
    return ServedRow(
        engine=run.engine,
        options=run.options,
        concurrency=run.concurrency,
        draft_tokens=run.drafted,
        requests=len(results),
        tau=tau,
        rounds=round_count,
        acceptance=depth_shares,
        tau_here=decode_statistics(map(_without_last, run.here)).tau,
        identical_to_plain=sum(r.identical(method) for r in results) if matches.get(PLAIN) is not None else None,
        plain_identical_to_reference=matches.get(PLAIN),
        identical_to_reference=matches[DRAFTED],
        retokenised=flag_names.count("retokenised"),
        unread=flag_names.count(UNREAD),
        tokens_per_second={arm: sum(len(g.tokens) for g in texts) / arm_seconds[arm] for arm, texts in by_arm.items()},
        seconds_per_token={arm: _seconds_per_token(texts) for arm, texts in by_arm.items()},
        loops={arm: count_loops([g.tokens for g in texts]) for arm, texts in by_arm.items()},
        speedup=over_plain,
        speedup_without_loops=loopless_speedup,
        load=run.load,
        verdict=judge_speed(loopless_speedup, run.load.busy),
    )


def _count_equal(texts: Texts, references: Sequence[Sequence[int]]) -> int:
    return sum(text.tokens == tuple(reference_ids) for text, reference_ids in zip(texts, references, strict=True))


def _seconds_per_token(texts: Texts) -> float:
    token_count = sum(len(r.tokens) for text in texts for r in text.rounds)
    return sum(text.decode_seconds for text in texts) / max(1, token_count)


def after_first_step(generation: Generation) -> float:
    """Seconds per token after the engine's first step, which reads the prompt and may already verify a draft."""
    return generation.decode_seconds / sum(len(r.tokens) for r in generation.rounds)


def _without_last(generation: Generation) -> Generation:
    """The generation without its last round: the text ended within that draft, so its acceptance is unknown."""
    return replace(generation, rounds=generation.rounds[:-1])


def _acceptance(
    texts: Texts, run: EngineRun, random_streams: Streams
) -> tuple[float | None, int | None, tuple[DepthShare, ...]]:
    """τ, rounds and acceptance by depth in the engine; None for what is unknown. texts: of the arm that drafts.

    Where the engine shows rounds, they are counted for each text. A server that shows only counters is compared by
    block. Its counters include the last rounds of texts, one a text, so differences may be larger by their share.
    """
    max_depth, unit_names = run.drafted, [r.unit for r in run.results]
    served, local = _depths(texts, max_depth), _depths(run.here, max_depth)  # [texts, 1 + K]
    server_counts = [counts for counts, _ in run.counts if counts is not None]
    if not server_counts:
        tau = decode_statistics(map(_without_last, texts)).tau
        return tau, int(served[:, 0].sum()), _compare_depths(served, local, unit_names, random_streams)
    if any(len(counts) != 1 + max_depth for counts in server_counts):  # a server that does not count by depth
        return None, None, ()
    block_edges = [*accumulate((prompt_count for _, prompt_count in run.counts), initial=0)]
    served, local = (np.add.reduceat(side, block_edges[:-1]) for side in (served, local))  # [blocks, 1 + K]
    served[[counts is not None for counts, _ in run.counts]] = server_counts  # where a server counted
    round_count, accepted = int(served[:, 0].sum()), int(served[:, 1:].sum())
    block_units = [" ".join(unit_names[start:end]) for start, end in pairwise(block_edges)]
    depth_shares = _compare_depths(served, local, block_units, random_streams, len(texts) / max(1, round_count))
    return 1 + accepted / max(1, round_count), round_count, depth_shares


def _depths(generations: Iterable[Generation], max_depth: int) -> RoundCounts:
    """[n, 1 + depth]: for each generation the number of whole rounds, then of those that accepted at least 1, 2, …
    Example: rounds that accepted 0, 2 and 1 tokens give [3, 2, 1] at depth 2."""
    accepted = [np.array([r.accepted for r in _without_last(g).rounds], np.int64) for g in generations]
    return np.array([(accepted_counts[:, None] >= np.arange(1 + max_depth)).sum(0) for accepted_counts in accepted])


def _compare_depths(
    served: RoundCounts, local: RoundCounts, units: Sequence[str], random_streams: Streams, tolerance: float = 0.0
) -> tuple[DepthShare, ...]:
    """By depth: the share of rounds accepted so far there and here, and the interval of the difference over units.

    served, local [n, 1 + depth]: see `_depths`. units: of resampling, one for each of n. tolerance: a difference up to
    this and `LARGEST_DIFFERENCE` together is not reported.
    """
    row_of_unit = {unit: row for row, unit in enumerate(dict.fromkeys(units))}
    counts = np.zeros((2, len(row_of_unit), served.shape[1]), np.int64)  # [sides, units, 1 + K]
    for side, side_counts in enumerate((served, local)):
        np.add.at(counts[side], [row_of_unit[unit] for unit in units], side_counts)
    picks = random_streams.arrays("served").integers(counts.shape[1], size=(_DRAWS, counts.shape[1]))  # [draws, units]
    drawn_counts = counts[:, picks].sum(2)  # [sides, draws, 1 + K]
    shares, drawn_shares = (part[..., 1:] / np.maximum(1, part[..., :1]) for part in (counts.sum(1), drawn_counts))
    low, high = np.quantile(drawn_shares[0] - drawn_shares[1], (0.025, 0.975), axis=0)  # [K] each
    return tuple(
        DepthShare(
            depth=i + 1,
            served=float(shares[0, i]),
            here=float(shares[1, i]),
            difference_ci95=(float(low[i]), float(high[i])),
            differs=bool(abs(shares[0, i] - shares[1, i]) > LARGEST_DIFFERENCE + tolerance)
            and len(row_of_unit) >= MIN_PROMPTS
            and not low[i] <= 0 <= high[i],
        )
        for i in range(shares.shape[1])
    )


def served_table(reports: Sequence[MethodReport]) -> Table:
    """A row for every method and concurrency in an engine."""
    return fill_table(SERVED, [_served_cells(report.method, row) for report in reports for row in report.served or ()])


def _served_cells(method: str, row: ServedRow) -> Mapping[str, object]:
    """The values of a row's cells by name, see `SERVED`."""
    matches, plain_matches = row.identical_to_reference, row.plain_identical_to_reference
    # "7/8 (6)": 7 of 8 texts equal the engine's plain ones, and 6 plain ones the reference's; "(6/8)": no plain arm.
    same_text = f"({matches}/{row.requests})"
    if plain_matches is not None:
        same_text = f"{row.identical_to_plain}/{row.requests} ({plain_matches})"
    return {
        **vars(row),
        "method": method,
        "there": " ".join(f"{share.served:.3f}" for share in row.acceptance),
        "here": " ".join(f"{share.here:.3f}{'*' * share.differs}" for share in row.acceptance),
        "identical": "" if matches is None else same_text,
        "tokens": " → ".join(format_figure(speed, ".1f") for speed in row.tokens_per_second.values()),
        "spent": " → ".join(f"{1000 * seconds:.1f}" for seconds in row.seconds_per_token.values()),
    }


def served_lines(reports: Sequence[MethodReport]) -> list[str]:
    """The engine's part of report.md; empty without an engine."""
    rows = [row for report in reports for row in report.served or ()]
    if not rows:
        return []
    lines = [f"## In {escape_controls(rows[0].engine)}", "", *served_table(reports).markdown(), ""]
    lines += dict.fromkeys(warning for row in rows for warning in row.load.warnings())
    for report in reports:
        if report.served:
            lines += [f"- {report.method}{note}" for note in _notes(report, report.served)]
    return lines + schedule_lines(reports)


def _notes(report: MethodReport, rows: Sequence[ServedRow]) -> Iterator[str]:
    """Notes on a method in an engine: judgements, unknown tokens, and another acceptance than here."""
    for arm, judgement in (report.served_judgement or {}).items():
        yield f", {arm}: of {judgement.texts} texts audited ({judgement.file}): {judgement.verdict}."
    retokenised, unread = sum(row.retokenised for row in rows), sum(row.unread for row in rows)
    if retokenised or unread:
        note = f": {retokenised} texts came without token ids and were tokenised again"
        yield f"{note}; {unread} of them are not tokenised so, and not audited."
    depths = {share.depth for row in rows for share in row.acceptance if share.differs}
    # An engine with its own options of drafting, or its own prompt lookup, may accept otherwise.
    if depths and not rows[0].options.get("speculative_config") and KINDS[source_of(report)].vllm_method != "ngram":
        yield (
            f": the engine accepts otherwise than this runtime at depth {min(depths)}. "
            "One of them reads the drafter in another way (doctor=true says whether it is this one), or chooses "
            "drafted tokens in another way, as engines may where tokens are drawn."
        )


def source_of(report: MethodReport) -> str:
    return str(report.settings["source"])


def schedule_lines(reports: Sequence[MethodReport]) -> list[str]:
    """Which draft length pays at which concurrency, by kind of drafter, and the engine's own option for it."""
    lines: list[str] = []
    for kind in dict.fromkeys(source_of(report) for report in reports if report.served):
        rows = [row for report in reports if source_of(report) == kind for row in report.served or ()]
        is_unreliable = any(row.load.busy or row.speedup_without_loops.prompts < MIN_PROMPTS for row in rows)
        if is_unreliable or any(row.verdict == NOT_LOSSLESS for row in rows):
            continue  # then nothing can be faster
        k_ranges, lengths = choose_lengths(rows), sorted({row.draft_tokens for row in rows})
        usual_k = _USUAL_LENGTH if _USUAL_LENGTH in lengths else lengths[len(lengths) // 2]
        medians = {(row.concurrency, row.draft_tokens): row.speedup_without_loops.median or 0 for row in rows}
        range_texts = [f"{last if first == last else f'{first}–{last}'}: K = {k}" for first, last, k in k_ranges]
        # K = 0, plain decoding, has no row: its speed-up is 1.
        gains = [f"{medians.get((last, k), 1) / medians[last, usual_k]:.2f}× at {last}" for _, last, k in k_ranges]
        lengths_text = f"Draft lengths that pay for {kind} by requests at a time: {', '.join(range_texts)}"
        gain_text = f"Over K = {usual_k} everywhere this gains {', '.join(gains)}, on these prompts."
        lines += ["", f"{lengths_text}. {gain_text}", "", *_expected_speedups(rows)]
        if any(k for *_, k in k_ranges) and (option := _engine_option(kind, rows[0].engine, k_ranges)):
            lines += ["", "```", json.dumps(option), "```"]
    return lines


def _engine_option(kind: str, engine: str, k_ranges: Sequence[tuple[int, int, int]]) -> Mapping[str, object] | None:
    """The option by which an engine drafts by `choose_lengths`; None if it has none."""
    if kind == EAGLE3.name and engine.startswith("sglang"):  # --speculative-adaptive-config
        return {str(min_requests): {"candidate_steps": [k]} for min_requests, _, k in k_ranges}
    if not engine.startswith("vllm"):
        return None
    return {"num_speculative_tokens": max(k for *_, k in k_ranges), "num_speculative_tokens_per_batch_size": k_ranges}


def _expected_speedups(rows: Sequence[ServedRow]) -> Iterator[str]:
    """For each concurrency a line: the expected speed-up of each draft length between the measured ones.

    A step with K drafted tokens emits 1 + Σ a_d tokens, d ≤ K. a_d is the share of rounds that accepted d tokens. The
    time of a step is τ times the time of a token; between measured lengths it is interpolated. Example: a = (0.8, 0.6)
    and a step of 1.2 plain steps at K = 2 give (1 + 0.8 + 0.6) / 1.2 = 2.00×.
    """
    lengths = sorted({row.draft_tokens for row in rows})
    if len(lengths) < 2 or not all(row.rounds and len(row.acceptance) == row.draft_tokens for row in rows):
        return
    shares = [_share(rows, i) for i in range(lengths[-1])]
    for concurrency in sorted({row.concurrency for row in rows}):
        row_by_length = {row.draft_tokens: row for row in rows if row.concurrency == concurrency}
        costs = [_cost(row_by_length[k]) for k in lengths]
        expected = {k: (1 + sum(shares[:k])) / np.interp(k, lengths, costs) for k in range(lengths[0], lengths[-1] + 1)}
        gain_texts = (
            f"K = {k} {gain:.2f}×{f' ({row_by_length[k].speedup:interval})' if k in row_by_length else ''}"
            for k, gain in expected.items()
        )
        line_start = f"- {concurrency} at a time, the speed-up expected of acceptance and seconds of a step (measured)"
        yield f"{line_start}: {', '.join(gain_texts)}."


def _cost(row: ServedRow) -> float:
    """The seconds of a step with a draft, in steps without a draft."""
    return (row.tau or 0) * row.seconds_per_token[DRAFTED] / row.seconds_per_token[PLAIN]


def _share(rows: Sequence[ServedRow], index: int) -> float:
    """The share of rounds that accepted the drafted token at this index, from 0, among rounds that drafted it."""
    reaching = [row for row in rows if row.draft_tokens > index]
    accepted = sum((row.rounds or 0) * row.acceptance[index].served for row in reaching)
    return accepted / sum(row.rounds or 0 for row in reaching)


def choose_lengths(rows: Sequence[ServedRow]) -> list[tuple[int, int, int]]:
    """(first, last, K) by ranges of requests at a time: the K of the largest speed-up, 0 where no K is faster.

    A range ends with a measured concurrency: with 1 and 8 measured, [(1, 1, 5), (2, 8, 2)]. Beyond 8 nothing is known.
    """
    k_ranges, first_concurrency = [], 1
    for concurrency in sorted({row.concurrency for row in rows}):
        faster_rows = [row for row in rows if row.concurrency == concurrency and row.verdict == "faster"]
        best = max(faster_rows, key=lambda row: row.speedup_without_loops.median or 0, default=None)
        k_ranges.append((first_concurrency, concurrency, best.draft_tokens if best else 0))
        first_concurrency = concurrency + 1
    return k_ranges
