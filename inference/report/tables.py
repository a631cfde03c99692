"""The tables of all pages. The columns of a table (`Columns`) state title, template and meaning of each figure once.

An arm is a way to decode: a method, or one of the baselines `PLAIN` and `GENERATE`. A text loops if it repeats a cycle
of tokens. A tie: two texts part where two tokens have the same score up to rounding.
"""

from collections.abc import Mapping, Sequence

from outrider.base.words import Columns, Table, fill_table
from outrider.inference.measure.lossless import BULK, GAP, PEAK
from outrider.inference.measure.statistics import MARGIN, MIN_PROMPTS
from outrider.inference.report.types import MethodReport
from outrider.inference.settings.method import TRANSFORMERS

Row = Mapping[str, object]  # the values of a row's cells, by name
PLAIN, GENERATE = "plain decoding", "transformers generate"
# Forms of the templates: .2f, .1% and so on as of `format`, with "?" also zero as a dash. A `MedianInterval` has
# "interval" (1.52× [1.40, 1.60]), "times" (1.52×) and "ms" (12.1 [11.8, 12.9], of seconds).
METHODS: Columns = {
    "method": ("{method}", "how drafts were made; plain decoding: the target alone, in this runtime"),
    "verdict": (
        "{verdict}",
        f"faster or slower where the whole interval says so by more than {MARGIN:.0%}, else "
        f"undecided; of fewer than {MIN_PROMPTS} prompts always undecided",
    ),
    "speed-up [95 %]": (
        "{speedup:interval}",
        "how many times as fast as plain decoding: the median over prompts, and "
        "where the median of other such prompts lies with 95 % confidence",
    ),
    "without loops [95 %]": (
        "{speedup_without_loops:interval}",
        "the same of the texts that do not repeat themselves; the verdict comes from it",
    ),
    "vs transformers": ("{over_generate:interval}", "the same over transformers' own generate"),
    "tokens/s": ("{speed:.1f}", "decoded tokens a second, the prefill left out"),
    "tokens a pass": (
        "{tau:.2f?}",
        "τ: tokens that one pass of the target yields on average, its own included; 1 without a drafter",
    ),
    "accepted": ("{acceptance_rate:.2f}", "v_d: share of the tested drafted tokens that the target accepted"),
    "from drafter": ("{draft_share:.2f}", "r_d: share of the text that was drafted"),
    "drafted a pass": ("{drafted_tokens_per_round:.2f}", "tokens drafted before each pass of the target"),
    "same text as plain decoding": ("{same_as_plain}", "texts that equal those of this runtime without a drafter"),
    "same text as transformers": (
        "{identical}",
        "texts that equal those of transformers' generate; ties: others, which part where rounding decides",
    ),
}
END_TO_END: Columns = {
    "from the prompt on": ("{method}", "how drafts were made"),
    "prefill ms [95 %]": ("{prefill:ms}", "milliseconds before the first token, a drafter's own among them"),
    "decoding": ("{speedup:times}", "the speed-up of what comes after"),
    "prefill and decoding [95 %]": ("{end_to_end:interval}", "the speed-up with the prefill counted"),
    "vs transformers": ("{whole_over_generate:interval}", "the same over transformers' own generate"),
}
COUNTS: Columns = {
    "method": METHODS["method"],
    "HM": ("{harmonic_mean:.1%}", "the harmonic mean of accepted (v_d) and from drafter (r_d)"),
    "tokens a pass of requests": ("{tau_of_requests:.2f}", "the mean over answers of each one's own τ"),
    "accepted a pass": ("{accepted_per_round:.2f}", "accepted draft tokens a pass: τ without the target's own token"),
    "accepted a pass of requests": ("{accepted_per_round_of_requests:.2f}", "the mean over answers of that"),
    "whole answers, tokens/s": (
        "{whole_answers_per_second[speculative]:.1f}",
        "all tokens over all time from the prompt on",
    ),
}
CATEGORY_COLS = ("method", "tokens a pass", "accepted", "drafted a pass", "speed-up [95 %]", "without loops [95 %]")
# A judged arm decodes the reference text again. Its keys, values and logits are compared with the target's in twice the
# precision; the unit of the errors and their limits is the rounding error of transformers' own pass (`lossless`).
JUDGEMENTS: Columns = {
    "method": ("{method}", "which of the ways to decode"),
    f"worst row (at most {BULK})": (
        "{bulk:.2f}: {bulk_at}",
        "the keys, values or logits that are furthest off on average",
    ),
    f"worst position (at most {PEAK:.0f})": ("{peak:.1f}: {peak_at}", "the same at one place of one text"),
    f"largest gap (at most {GAP:.0f})": (
        "{largest_gap:.1f}",
        "how much likelier the best token was than one chosen in its place",
    ),
    "other choices": (
        "{ties} of {positions} (transformers: {own_ties})",
        "positions at which another token would have been chosen; transformers' own pass has some too",
    ),
    "faults": ("{verdict}", "what is beyond its limit"),
}


def identical_text(report: MethodReport, same: int, tie_count: int = 0) -> str:
    """How many compared texts are the `same` as the baseline's, and how many differ by ties only: "11/12 (+1 ties)"."""
    if report.conditions.temperature:
        return "sampled"
    return f"{same}/{report.lossless.checked}{f' (+{tie_count} ties)' if tie_count else ''}"


def arms_and_methods(reports: Sequence[MethodReport]) -> list[Row]:
    """The cells of plain decoding, of transformers' generate if it was run, and of each of `reports`."""
    first, gen_speed = reports[0], reports[0].transformers_generate
    ref_cell, lossless = "sampled" if first.conditions.temperature else "reference", first.lossless
    same_cell = identical_text(first, lossless.autoregressive_identical, lossless.autoregressive_excused_ties)
    plain_row: Row = {"method": PLAIN, "tau": 1.0, "speedup": "1.00", "end_to_end": "1.00", "same_as_plain": ref_cell}
    rows: list[Row] = [{**plain_row, **_times(first, "autoregressive"), "identical": same_cell if gen_speed else "–"}]
    if gen_speed:
        ones = dict.fromkeys(("over_generate", "whole_over_generate"), "1.00")  # gen_speed: speedup and end_to_end
        cells = {"same_as_plain": same_cell, "identical": ref_cell}
        rows.append({"method": GENERATE, "tau": 1.0, **vars(gen_speed), **ones, **_times(first, TRANSFORMERS), **cells})
    for report in reports:
        compared = report.lossless
        cells_by_column = {
            "over_generate": report.figures.speedup.vs_transformers_generate or "",
            "whole_over_generate": report.end_to_end.vs_transformers_generate or "",
            "same_as_plain": identical_text(report, compared.identical_to_plain),
            "identical": identical_text(report, compared.identical, compared.excused_ties) if gen_speed else "–",
        }
        rows.append({**vars(report.figures), **vars(report), **_times(report, "speculative"), **cells_by_column})
    return rows


def _times(report: MethodReport, arm: str) -> Row:
    """The arm's decoded tokens a second, and its prefill."""
    return {"speed": report.tokens_per_second[arm], "prefill": report.prefill_seconds[arm]}


def methods_tables(reports: Sequence[MethodReport]) -> tuple[Table, Table]:
    """Verdict, speed-ups, τ and acceptance of each method; and the time of whole answers, the prefill included."""
    rows = arms_and_methods(reports)
    return fill_table(METHODS, rows), fill_table(END_TO_END, rows)


def counted_table(reports: Sequence[MethodReport]) -> Table:
    """The variants of τ in other papers, and the conditional acceptance at the first depths."""
    depths = range(min(6, max(len(report.acceptance_given_previous) for report in reports)))
    meaning = "how often the draft is right here, where it was right before"
    depth_columns = {f"depth {1 + i}": (f"{{acceptance_given_previous[{i}].accepted:.2f}}", meaning) for i in depths}
    return fill_table({**COUNTS, **depth_columns}, [{**vars(report.figures), **vars(report)} for report in reports])


def category_tables(reports: Sequence[MethodReport]) -> list[tuple[str, Table]]:
    """By category, what it is and the table of its figures."""
    columns, tables = {name: METHODS[name] for name in CATEGORY_COLS}, []
    for name, figures in reports[0].by_category.items():
        rows = [{**vars(report.by_category[name]), "method": report.method} for report in reports]
        tables.append((f"{name}, {figures.prompts} of the prompts: {figures.loops}", fill_table(columns, rows)))
    return tables


def judged_table(reports: Sequence[MethodReport]) -> Table:
    """The judgement of every arm that decoded the reference text again (see `JUDGEMENTS`)."""
    judged = {arm: judgement for report in reports for arm, judgement in report.lossless.judged.items() if judgement}
    faults = {arm: f"NOT LOSSLESS: {'; '.join(row.faults)}" for arm, row in judged.items() if row.faults}
    no_faults = "none above rounding"
    return fill_table(
        JUDGEMENTS, [{**vars(row), "method": arm, "verdict": faults.get(arm, no_faults)} for arm, row in judged.items()]
    )
