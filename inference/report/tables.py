"""The tables of all pages. A figure's title, form and meaning are stated once, in a list of columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.base.words import Columns, Table, figure, filled
from outrider.inference.measure.lossless import BULK, GAP, PEAK
from outrider.inference.measure.statistics import MARGIN, MIN_PROMPTS, loops_text
from outrider.inference.settings.method import TRANSFORMERS

Report = Mapping[str, Any]
PLAIN, GENERATE = "plain decoding", "transformers generate"

METHODS: Columns = {
    "method": ("{method}", "how drafts were made; plain decoding: the target alone, in this runtime"),
    "verdict": (
        "{verdict}",
        f"faster or slower where the whole interval says so by more than {MARGIN:.0%}, else undecided; of fewer than "
        f"{MIN_PROMPTS} prompts always undecided",
    ),
    "speed-up [95 %]": (
        "{speedup:interval}",
        "how many times as fast as plain decoding: the median over prompts, and where the median of other such prompts "
        "lies with 95 % confidence",
    ),
    "without loops [95 %]": (
        "{speedup_without_loops:interval}",
        "the same of the texts that do not repeat themselves; the verdict comes from it",
    ),
    "vs transformers": ("{speedup[vs_transformers_generate]:interval}", "the same over transformers' own generate"),
    "tokens/s": ("{tokens_per_second[speculative]:.1f}", "decoded tokens a second, the prefill left out"),
    "tokens a pass": (
        "{tau:.2f?}",
        "τ: tokens that one pass of the target yields on average, its own included; 1 without a drafter",
    ),
    "accepted": ("{acceptance_rate:.2f}", "v_d: share of the drafted tokens that the target accepted"),
    "from drafter": ("{draft_share:.2f}", "r_d: share of the text that was drafted"),
    "drafted a pass": ("{drafted_tokens_per_round:.2f}", "tokens drafted before each pass of the target"),
    "same text as plain decoding": ("{same_as_plain}", "texts that equal those of this runtime without a drafter"),
    "same text as transformers": (
        "{identical}",
        "texts that equal those of transformers' generate; ties: others, which part where rounding decides",
    ),
}
WHOLE: Columns = {
    "from the prompt on": ("{method}", "how drafts were made"),
    "prefill ms [95 %]": (
        "{prefill_seconds[speculative]:ms}",
        "milliseconds before the first token, a drafter's own among them",
    ),
    "decoding": ("{speedup:times}", "the speed-up of what comes after"),
    "prefill and decoding [95 %]": ("{end_to_end:interval}", "the speed-up with the prefill counted"),
    "vs transformers": ("{end_to_end[vs_transformers_generate]:interval}", "the same over transformers' own generate"),
}
COUNTED: Columns = {
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
CATEGORY = ("method", "tokens a pass", "accepted", "drafted a pass", "speed-up [95 %]", "without loops [95 %]")
JUDGED: Columns = {
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
    "faults": ("{found}", "what is beyond its limit"),
}
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
        "texts that equal the engine's own without a drafter; in brackets, those of it (without it, those with a "
        "drafter) that equal the reference's",
    ),
    "tokens/s": ("{tokens}", "of all requests together, without a drafter and with it"),
    "ms/token": ("{spent}", "of a request after its first step, without a drafter and with it"),
    "speed-up [95 %]": ("{speedup:interval}", "of a request's decoding: the median over prompts"),
    "without loops [95 %]": METHODS["without loops [95 %]"],
    "verdict": ("{verdict}", "as above"),
}


def identical_text(report: Report, key: str = "identical", ties: str = "excused_ties") -> str:
    """How many compared texts equal the reference's, and how many ties, by their keys in the report."""
    if report["temperature"]:
        return "sampled"
    lossless = report["lossless"]
    excused = lossless.get(ties)
    return f"{lossless.get(key, '–')}/{lossless['checked']}{f' (+{excused} ties)' if excused else ''}"


def arms_and_methods(reports: Sequence[Report]) -> list[Report]:
    """Plain decoding and, if run, transformers' generate, as reports of the figures they have; then `reports`."""
    first, reference = reports[0], "sampled" if reports[0]["temperature"] else "reference"
    plain = identical_text(first, "autoregressive_identical", "autoregressive_excused_ties")
    rows: list[dict[str, Any]] = [{"method": PLAIN, "speedup": "1.00", "end_to_end": "1.00"}]
    rows[0] |= {"same_as_plain": reference, "identical": plain}
    if first["prefill_seconds"][TRANSFORMERS] is not None:
        speedups = {name: {**speed, "vs_transformers_generate": "1.00"} for name, speed in first[TRANSFORMERS].items()}
        rows.append({"method": GENERATE, "same_as_plain": plain, "identical": reference, **speedups})
    for row, arm in zip(rows, ("autoregressive", TRANSFORMERS), strict=False):
        row["tau"] = 1.0
        row |= {key: {"speculative": first[key][arm]} for key in ("tokens_per_second", "prefill_seconds")}
    for report in reports:
        same, identical = identical_text(report, "identical_to_plain", ""), identical_text(report)
        rows.append({**report, "same_as_plain": same, "identical": identical})
    return [*rows] if len(rows) > 1 + len(reports) else [{**row, "identical": "–"} for row in rows]


def methods_tables(reports: Sequence[Report]) -> tuple[Table, Table]:
    """Verdict, speed-ups, τ and acceptance of each method; and the time of whole answers, the prefill included."""
    rows = arms_and_methods(reports)
    return filled(METHODS, rows), filled(WHOLE, rows)


def counted_table(reports: Sequence[Report]) -> Table:
    """The variants of τ in other papers, and the conditional acceptance at the first depths."""
    depths = range(min(6, max(len(report["acceptance_given_previous"]) for report in reports)))
    often = "how often the draft is right here, where it was right before"
    deeper = {f"depth {1 + i}": (f"{{acceptance_given_previous[{i}][accepted]:.2f}}", often) for i in depths}
    return filled({**COUNTED, **deeper}, reports)


def category_tables(reports: Sequence[Report]) -> list[tuple[str, Table]]:
    """By category, what it is and the table of its figures."""
    columns, tables = {name: METHODS[name] for name in CATEGORY}, []
    for name, figures in reports[0]["by_category"].items():
        rows = [{**report["by_category"][name], "method": report["method"]} for report in reports]
        title = f"{name}, {figures['prompts']} of the prompts: {loops_text(figures['loops'])}"
        tables.append((title, filled(columns, rows)))
    return tables


def judged_table(reports: Sequence[Report]) -> Table:
    """The judgement of every arm by rounding errors over the reference's text, in units of transformers' own."""
    judged = {arm: row for report in reports for arm, row in report["lossless"]["judged"].items() if row}
    faults = {arm: f"NOT LOSSLESS: {'; '.join(row['faults'])}" for arm, row in judged.items() if row["faults"]}
    rows = [{**row, "method": arm, "found": faults.get(arm, "none above rounding")} for arm, row in judged.items()]
    return filled(JUDGED, rows)


def served_table(reports: Sequence[Report]) -> Table:
    """A row for every method and concurrency in an engine."""
    return filled(SERVED, [_served(report, row) for report in reports for row in report.get("served") or ()])


def _served(report: Report, row: Report) -> Report:
    depths, count = row["acceptance"], row["requests"]
    matches, plain = row["identical_to_reference"], row["plain_identical_to_reference"]
    same = f"({matches}/{count})" if plain is None else f"{row['identical_to_plain']}/{count} ({plain})"
    return {
        **row,
        "method": report["method"],
        "there": " ".join(f"{depth['served']:.3f}" for depth in depths),
        "here": " ".join(f"{depth['here']:.3f}{'*' * depth['differs']}" for depth in depths),
        "identical": "" if matches is None else same,
        "tokens": " → ".join(figure(speed, ".1f") for speed in row["tokens_per_second"].values()),
        "spent": " → ".join(f"{1000 * seconds:.1f}" for seconds in row["seconds_per_token"].values()),
    }
