"""report.html: one self-contained file with its styles and script, without external resources."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from inference.measure.results import PromptResult
from inference.measure.statistics import loops_text, tau_text
from inference.report.drafter_facts import drafter_lines
from inference.report.overlap import overlap_sentence
from inference.report.page.markup import Markup, as_table, tag
from inference.report.page.plots import acceptance, speedups, time_split
from inference.report.page.proof import proof_section
from inference.report.page.texts import Decode, texts_section
from inference.report.served import served_table
from inference.report.tables import METHODS, methods_table, whole_table
from inference.report.wording import (
    Report,
    busy_sentences,
    conditions,
    interval_text,
    method_sentence,
    number_text,
    plain_sentence,
    recommendation,
)
from outrider.tables import Table

HERE = Path(__file__).parent


def make_page(reports: Sequence[Report], results: Sequence[PromptResult], decode: Decode) -> str:
    """The page of one evaluation. decode: token ids → text, special tokens included.

    Any text is safe: model output is escaped.
    """
    first = reports[0]
    names = [report["method"] for report in reports]
    methods = f"{len(names)} methods" if len(names) > 3 else " and ".join(names)
    title = f"Outrider: how fast {methods} decode {Path(first['target']).name}"
    head = (
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup((HERE / "page.css").read_text(encoding="utf-8"))),
    )
    pieces = enumerate(recommendation(reports).split("`"))
    said = [tag("code", part) if place % 2 else part for place, part in pieces]  # what stands in backticks as code
    body = (
        tag("h1", title),
        *(tag("p", busy, class_="busy") for busy in busy_sentences(first)),
        tag("p", tag("strong", "Verdict: "), *said, id="verdict"),
        tag("p", conditions(reports)),
        *_section("What each method gains", *_gains(reports), _counted(reports)),
        *_served(reports),
        *_section("Plots", tag("div", speedups(reports), acceptance(reports), time_split(reports), class_="plots")),
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


def _served(reports: Sequence[Report]) -> tuple[Markup, ...]:
    """The table of the serving engine, if one was measured."""
    rows = [row for report in reports for row in report.get("served") or ()]
    return _section(f"In {rows[0]['engine']}", as_table(served_table(reports))) if rows else ()


def _gains(reports: Sequence[Report]) -> tuple[Markup, ...]:
    """The tables of the methods, and their tooltips as text, for devices without hover."""
    gained, whole = methods_table(reports), whole_table(reports)
    columns = {**gained.columns, **whole.columns}
    said = [part for name, text in columns.items() for part in (tag("dt", name), tag("dd", text))]
    explained = tag("details", tag("summary", "What the columns say"), tag("dl", *said))
    return as_table(gained), explained, tag("details", tag("summary", "With the prefill"), as_table(whole))


def _counted(reports: Sequence[Report]) -> Markup:
    """The variants of τ in other papers, and the conditional acceptance at the first depths."""
    depths = range(min(6, max(len(report["acceptance_given_previous"]) for report in reports)))
    heads = {
        "method": "how drafts were made",
        "HM": "the harmonic mean of accepted (v_d) and from drafter (r_d), in percent",
        "tokens a pass of requests": "the mean over answers of each one's own τ",
        "accepted a pass": "accepted draft tokens a pass: τ without the target's own token",
        "accepted a pass of requests": "the mean over answers of that",
        "whole answers, tokens/s": "all tokens over all time from the prompt on",
        **{f"depth {depth + 1}": "how often the draft is right here, where it was right before" for depth in depths},
    }
    rows = []
    for report in reports:
        keys = ("tau_of_requests", "accepted_per_round", "accepted_per_round_of_requests")
        given = [f"{row['accepted']:.2f}" for row in report["acceptance_given_previous"]]
        given = [*given, *[""] * len(depths)][: len(depths)]
        mean, whole = 100 * report["harmonic_mean"], number_text(report["whole_answers_per_second"]["speculative"])
        rows.append((report["method"], f"{mean:.1f}", *(f"{report[key]:.2f}" for key in keys), whole, *given))
    return tag("details", tag("summary", "Counted otherwise"), as_table(Table(heads, rows)))


def _categories(reports: Sequence[Report]) -> list[Markup]:
    """One panel per category, the first one open."""
    panels: list[Markup] = []
    names = ("method", "tokens a pass", "accepted", "drafted a pass", "speed-up [95 %]", "without loops [95 %]")
    columns = {name: METHODS[name] for name in names}
    for name, mine in reports[0]["by_category"].items():
        rows = []
        for report in reports:
            own = report["by_category"][name]
            cells = (tau_text(own["tau"]), f"{own['acceptance_rate']:.2f}", f"{own['drafted_tokens_per_round']:.2f}")
            speeds = (interval_text(own[key]) for key in ("speedup", "speedup_without_loops"))
            rows.append((report["method"], *cells, *speeds))
        summary = tag("summary", f"{name}, {mine['prompts']} of the prompts: {loops_text(mine['loops'])}")
        panels.append(tag("details", summary, as_table(Table(columns, rows)), open=not panels or None))
    return panels


def _overlaps(report: Report) -> list[Markup]:
    found = report.get("overlap", {})
    said = [tag("p", overlap_sentence(kind, one)) for kind, one in found.items()]
    return said or [tag("p", "No drafter here has learned from a text.")]


def _facts(report: Report) -> Markup:
    """Machine, versions, and digests of target and drafters; folded, the kernels."""
    made = report["made_with"]
    facts = {
        "target": report["target"],
        "drafter": report["drafter"],
        **{f"machine: {name}": value for name, value in report["machine"].items()},
        "dtype": report["dtype"],
        "computes in": report.get("computes_in", report["dtype"]),
        "device": report["device"],
        "runtime": report.get("runtime", ""),
        **{f"made with: {name}": value for name, value in made.items()},
        **{f"digest: {name}": value for name, value in report.get("digests", {}).items()},
        "peak memory": _peak(report.get("peak_memory_bytes", 0)),
        "seed": report["seed"],
    }
    folded = tag("details", tag("summary", "The kernels that were chosen"), _listed(report.get("kernels", {})))
    return tag("div", _listed(facts), folded)


def _listed(facts: Mapping[str, object]) -> Markup:
    return tag("dl", *(part for name, value in facts.items() for part in (tag("dt", name), tag("dd", value))))


def _peak(size: int) -> str:
    return f"{size / 2**30:.2f} GiB, all arms and models together" if size else "not known on this system"


def _sentences(reports: Sequence[Report]) -> list[str]:
    first = reports[0]
    left_out = [f"Left out: {turn['prompt_id']} ({turn['reason']})." for turn in first.get("skipped", [])]
    lines = [*plain_sentence(first), *map(method_sentence, reports), *drafter_lines(first), *left_out]
    return [line for line in lines if line and line != "```"]
