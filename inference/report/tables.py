"""The tables of a report, for all of its pages: one row per method, baselines first."""

from collections.abc import Sequence

from inference.measure.results import TRANSFORMERS
from inference.measure.statistics import MARGIN, MIN_PROMPTS, tau_text
from inference.report.wording import (
    Report,
    identical_with_ties,
    interval_text,
    milliseconds_text,
    number_text,
    times_text,
)
from outrider.tables import Table

METHODS = {
    "method": "how drafts were made; plain decoding: the target alone, in this runtime",
    "verdict": f"faster or slower where the whole interval says so by more than {MARGIN:.0%}, else undecided; of fewer "
    f"than {MIN_PROMPTS} prompts always undecided",
    "speed-up [95 %]": "how many times as fast as plain decoding: the median over prompts, and where the median of "
    "other such prompts lies with 95 % confidence",
    "without loops [95 %]": "the same of the texts that do not repeat themselves; the verdict comes from it",
    "vs transformers": "the same over transformers' own generate",
    "tokens/s": "decoded tokens a second, the prefill left out",
    "tokens a pass": "τ: tokens that one pass of the target yields on average, its own included; 1 without a drafter",
    "accepted": "v_d: share of the drafted tokens that the target accepted",
    "from drafter": "r_d: share of the text that was drafted",
    "drafted a pass": "tokens drafted before each pass of the target",
    "identical": "texts that equal, token for token, what transformers' generate says, of those compared; ties: texts "
    "that part from it where rounding decides",
}
WHOLE = {
    "from the prompt on": "how drafts were made",
    "prefill ms [95 %]": "milliseconds before the first token, a drafter's own among them",
    "decoding": "the speed-up of what comes after",
    "prefill and decoding [95 %]": "the speed-up with the prefill counted",
    "vs transformers": "the same over transformers' own generate",
}
PLAIN = "plain decoding"


def methods_table(reports: Sequence[Report]) -> Table:
    """The verdict, speed-ups, τ and acceptance of each method."""
    first, nothing_drafted = reports[0], ("1.00", "", "", "")
    speeds = {name: number_text(speed) for name, speed in first["tokens_per_second"].items()}
    identical = identical_with_ties(first, "autoregressive_")
    rows: list[tuple[str, ...]] = [(PLAIN, "", "1.00", "", "", speeds["autoregressive"], *nothing_drafted, identical)]
    if first["tokens_per_second"][TRANSFORMERS] is not None:
        role, faster = "sampled" if first["temperature"] else "reference", interval_text(first[TRANSFORMERS]["speedup"])
        rows.append(("transformers generate", "", faster, "", "1.00", speeds[TRANSFORMERS], *nothing_drafted, role))
    return Table(METHODS, [*rows, *map(_gained, reports)])


def whole_table(reports: Sequence[Report]) -> Table:
    """The time of whole answers: the prefill, including the drafter's, and decoding."""
    first = reports[0]
    prefills = first["prefill_seconds"]
    rows = [(PLAIN, milliseconds_text(prefills["autoregressive"]), "1.00", "1.00", "")]
    if prefills[TRANSFORMERS] is not None:
        speed, whole = times_text(first[TRANSFORMERS]["speedup"]), interval_text(first[TRANSFORMERS]["end_to_end"])
        rows.append(("transformers generate", milliseconds_text(prefills[TRANSFORMERS]), speed, whole, "1.00"))
    for report in reports:
        whole = report["end_to_end"]
        against = interval_text(whole.get("vs_transformers_generate"))
        prefill = milliseconds_text(report["prefill_seconds"]["speculative"])
        rows.append((report["method"], prefill, times_text(report["speedup"]), interval_text(whole), against))
    return Table(WHOLE, rows)


def _gained(report: Report) -> tuple[str, ...]:
    speedup = report["speedup"]
    return (
        report["method"],
        report["verdict"],
        interval_text(speedup),
        interval_text(report["speedup_without_loops"]),
        interval_text(speedup.get("vs_transformers_generate")),
        number_text(report["tokens_per_second"]["speculative"]),
        tau_text(report["tau"]),
        *(f"{report[key]:.2f}" for key in ("acceptance_rate", "draft_share", "drafted_tokens_per_round")),
        identical_with_ties(report),
    )
