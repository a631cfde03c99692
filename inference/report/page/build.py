"""report.html: one self-contained file with its styles and script; it loads nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.measure.results import TRANSFORMERS, PromptResult
from inference.measure.speed import MARGIN
from inference.report.drafter_facts import drafter_lines
from inference.report.overlap import overlap_sentence
from inference.report.page.markup import Markup, tag
from inference.report.page.plots import acceptance, legend, speedups, time_split
from inference.report.page.proof import proof_section
from inference.report.page.texts import Decode, texts_section
from inference.report.wording import (
    busy_sentences,
    conditions,
    identical_text,
    identical_with_ties,
    interval_text,
    method_sentence,
    milliseconds_text,
    number_text,
    plain_sentence,
    times_text,
)

HERE = Path(__file__).parent
COLUMNS = {  # of the table: the tooltip of each
    "method": "how drafts were made; autoregressive: by nobody",
    "identical": "texts that equal, token for token, what transformers' generate says, of those compared",
    "τ": "tokens that one pass of the target yields on average, its own included; 1 is decoding without a drafter",
    "v_d": "share of the drafted tokens that the target accepted",
    "r_d": "share of the text that was drafted",
    "drafted/round": "tokens drafted before each pass of the target",
    "tokens/s": "decoded tokens a second, the prefill left out",
    "speed-up [95 %]": "how many times as fast as decoding without a drafter: the median over prompts, and where the "
    "median of other such prompts lies with 95 % confidence",
    "vs transformers": "the same over transformers' own generate",
    "prefill ms": "milliseconds before the first token",
    "whole answer": "the speed-up with the prefill counted",
    "verdict": f"faster or slower where the whole interval says so by more than {MARGIN:.0%}",
}

Report = Mapping[str, Any]


def make_page(reports: Sequence[Report], results: Sequence[PromptResult], decode: Decode) -> str:
    """The page of one evaluation. decode: token ids → text, special tokens included.

    All text is accepted: model output is escaped.
    """
    first = reports[0]
    title = f"{first['drafter']} on {first['target']}"
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup((HERE / "page.css").read_text(encoding="utf-8"))),
    )
    body = (
        tag("h1", title),
        *(tag("p", busy, class_="wrong") for busy in busy_sentences(first)),
        tag("p", conditions(reports)),
        *_section("What each method gains", _table(reports), _columns(), _counted(reports)),
        *_section("Plots", legend(reports), speedups(reports), acceptance(reports), time_split(reports)),
        *_section("The text itself", texts_section(results, decode)),
        *_section("By category", *_categories(reports)),
        *_section("Is it the target's own text?", *proof_section(reports)),
        *_section("Has the drafter seen the prompts?", *_overlaps(first)),
        *_section("What was measured, and on what", _facts(first)),
        *_section("In words", *(tag("p", line) for line in _sentences(reports))),
        tag("script", Markup((HERE / "page.js").read_text(encoding="utf-8"))),
    )
    return "<!doctype html>\n" + tag("html", tag("head", *head), tag("body", *body), lang="en") + "\n"


def _section(title: str, *content: Markup) -> tuple[Markup, ...]:
    return (tag("h2", title), *content)


def _table(reports: Sequence[Report]) -> Markup:
    """One row per method, baselines first."""
    first = reports[0]
    prefill, speeds = first["prefill_seconds"], first["tokens_per_second"]
    plain: tuple[object, ...] = (
        "autoregressive",
        identical_text(first, "autoregressive_identical"),
        "1.00",
        "",
        "",
        "",
    )
    plain += (
        number_text(speeds["autoregressive"]),
        "1.00",
        "",
        milliseconds_text(prefill["autoregressive"]),
        "1.00",
        "",
    )
    rows: list[tuple[object, ...]] = [plain]
    if speeds[TRANSFORMERS] is not None:
        role = "sampled" if first["temperature"] else "reference"
        baseline, speed = first[TRANSFORMERS], number_text(speeds[TRANSFORMERS])
        spent, whole = milliseconds_text(prefill[TRANSFORMERS]), times_text(baseline["end_to_end"])
        faster = interval_text(baseline["speedup"])
        rows.append(("transformers generate", role, "1.00", "", "", "", speed, faster, "1.00", spent, whole, ""))
    rows += [_row(report) for report in reports]
    header = tag("tr", *(tag("th", tag("abbr", name, title=said, tabindex=0)) for name, said in COLUMNS.items()))
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", header), tag("tbody", *body)), class_="scroll")


def _row(report: Report) -> tuple[object, ...]:
    speedup, verdict = report["speedup"], report["verdict"]
    shares = tuple(
        f"{report[key]:.2f}" for key in ("tau", "acceptance_rate", "draft_share", "drafted_tokens_per_round")
    )
    return (
        report["method"],
        identical_with_ties(report),
        *shares,
        number_text(report["tokens_per_second"]["speculative"]),
        interval_text(speedup),
        interval_text(speedup.get("vs_transformers_generate")),
        milliseconds_text(report["prefill_seconds"]["speculative"]),
        times_text(report["end_to_end"]),
        tag("span", verdict, class_=verdict if verdict != "not lossless" else "wrong"),
    )


def _counted(reports: Sequence[Report]) -> Markup:
    """τ as other papers count it, and the conditional acceptance at the first depths."""
    depths = range(min(6, max(len(report["acceptance_given_previous"]) for report in reports)))
    heads = {
        "method": "how drafts were made",
        "τ": "tokens a pass, all passes of all answers together",
        "τ of requests": "the mean over answers of each one's own τ",
        "accepted/round": "accepted draft tokens a pass: τ without the target's own token",
        "accepted/round of requests": "the mean over answers of that",
        "whole answers, tokens/s": "all tokens over all time from the prompt on",
        **{f"depth {depth + 1}": "how often the draft is right here, where it was right before" for depth in depths},
    }
    rows = [tag("tr", *(tag("th", tag("abbr", name, title=said, tabindex=0)) for name, said in heads.items()))]
    for report in reports:
        keys = ("tau", "tau_of_requests", "accepted_per_round", "accepted_per_round_of_requests")
        given = [f"{row['accepted']:.2f}" for row in report["acceptance_given_previous"][: len(depths)]]
        whole = number_text(report["whole_answers_per_second"]["speculative"])
        cells = (report["method"], *(f"{report[key]:.2f}" for key in keys), whole, *given)
        rows.append(tag("tr", *(tag("td", cell) for cell in cells)))
    return tag("details", tag("summary", "Counted otherwise"), tag("div", tag("table", *rows), class_="scroll"))


def _columns() -> Markup:
    """The tooltips as text, for devices without hover."""
    said = [part for name, text in COLUMNS.items() for part in (tag("dt", name), tag("dd", text))]
    return tag("details", tag("summary", "What the columns say"), tag("dl", *said))


def _categories(reports: Sequence[Report]) -> list[Markup]:
    """One panel per category, the first one open."""
    panels: list[Markup] = []
    for name, mine in reports[0]["by_category"].items():
        rows = [tag("tr", *(tag("th", head) for head in ("method", "τ", "v_d", "drafted/round", "speed-up [95 %]")))]
        for report in reports:
            own = report["by_category"][name]
            cells = [f"{own[key]:.2f}" for key in ("tau", "acceptance_rate", "drafted_tokens_per_round")]
            rows.append(
                tag("tr", *(tag("td", cell) for cell in (report["method"], *cells, interval_text(own["speedup"]))))
            )
        summary = tag("summary", f"{name}, {mine['prompts']} of the prompts")
        panels.append(
            tag("details", summary, tag("div", tag("table", *rows), class_="scroll"), open=not panels or None)
        )
    return panels


def _overlaps(report: Report) -> list[Markup]:
    found = report.get("overlap", {})
    said = [tag("p", overlap_sentence(kind, one)) for kind, one in found.items()]
    return said or [tag("p", "No drafter here has learned from a text.")]


def _facts(report: Report) -> Markup:
    """Machine, versions, and digests of target and drafters."""
    made = report["made_with"]
    facts = {
        **{f"machine: {name}": value for name, value in report["machine"].items()},
        "dtype": report["dtype"],
        "computes in": report.get("computes_in", report["dtype"]),
        "device": report["device"],
        "runtime": report.get("runtime", ""),
        **{f"kernel: {name}": value for name, value in report.get("kernels", {}).items()},
        **{f"made with: {name}": value for name, value in made.items()},
        **{f"digest: {name}": value for name, value in report.get("digests", {}).items()},
        "peak memory": _peak(report.get("peak_memory_bytes", 0)),
        "seed": report["seed"],
    }
    return tag("dl", *(part for name, value in facts.items() for part in (tag("dt", name), tag("dd", value))))


def _peak(size: int) -> str:
    return f"{size / 2**30:.2f} GiB, all arms and models together" if size else "not known on this system"


def _sentences(reports: Sequence[Report]) -> list[str]:
    first = reports[0]
    left_out = [f"Left out: {turn['prompt_id']} ({turn['reason']})." for turn in first.get("skipped", [])]
    lines = [*plain_sentence(first), *map(method_sentence, reports), *drafter_lines(first), *left_out]
    return [line for line in lines if line and line != "```"]
