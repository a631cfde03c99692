"""report.html: one self-contained file with its styles and script, without external resources.

This module says what is on the page. page.html, a jinja2 template, has the markup and escapes every text.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outrider.base.words import Table
from outrider.inference.core.tree import ROOT
from outrider.inference.measure.results import PromptResult, ShownRound
from outrider.inference.measure.statistics import loops_text
from outrider.inference.report.facts import drafter_lines, overlap_sentence
from outrider.inference.report.lossless import judgements, most_that_differ, resolution, wrong_arms
from outrider.inference.report.served import served_table
from outrider.inference.report.wording import (
    METHODS,
    Columns,
    Report,
    busy_sentences,
    conditions,
    filled,
    interval_text,
    method_sentence,
    methods_table,
    number_text,
    plain_sentence,
    recommendation,
    whole_table,
)

HERE = Path(__file__).parent
ASKED = 3000  # number of a prompt's last characters that are shown
REJECTED = 8  # rejected tokens shown in the text; the tree has all of them
WIDTH, LEFT, RIGHT, ROW, HEIGHT = 420, 52, 14, 46, 220  # of the plots
PARTS = ("draft", "verify", "structure", "other")  # the parts of a round's time (see `parts_of_time`)
MARKS = (  # methods are told apart by their shapes, too
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0", "M-4.5-4.5h9v9h-9z", "M0-6l6 10h-12z", "M0-6.5l6 6.5-6 6.5-6-6.5z",
    "M0 6l-6-10h12z",
)  # fmt: skip
VERDICTS = {**{name: name for name in ("faster", "slower", "undecided")}, "not lossless": "wrong",
            "target differs": "wrong"}  # fmt: skip
COUNTED: Columns = {
    "method": METHODS["method"],
    "HM": (
        "the harmonic mean of accepted (v_d) and from drafter (r_d), in percent",
        lambda one: f"{100 * one['harmonic_mean']:.1f}",
    ),
    "tokens a pass of requests": ("the mean over answers of each one's own τ", "{tau_of_requests:.2f}".format_map),
    "accepted a pass": (
        "accepted draft tokens a pass: τ without the target's own token",
        "{accepted_per_round:.2f}".format_map,
    ),
    "accepted a pass of requests": (
        "the mean over answers of that",
        "{accepted_per_round_of_requests:.2f}".format_map,
    ),
    "whole answers, tokens/s": (
        "all tokens over all time from the prompt on",
        lambda one: number_text(one["whole_answers_per_second"]["speculative"]),
    ),
}
Decode = Callable[[Sequence[int]], str]


def make_page(reports: Sequence[Report], results: Sequence[PromptResult], decode: Decode) -> str:
    """The page of one evaluation. decode: token ids → text, special tokens included.

    Any text is safe: model output is escaped.
    """
    first, names = reports[0], [report["method"] for report in reports]
    methods = f"{len(names)} methods" if len(names) > 3 else " and ".join(names)
    served = served_table(reports)
    style, script = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    loader = FileSystemLoader(HERE)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template("page.html").render(
        title=f"Outrider: how fast {methods} decode {Path(first['target']).name}",
        style=style, script=script, verdicts=VERDICTS, marks=MARKS, parts=PARTS, wide=WIDTH, methods=names,
        busy=busy_sentences(first), verdict=recommendation(reports), conditions=conditions(reports),
        gained=methods_table(reports), whole=whole_table(reports), counted=_counted(reports),
        served=served, engine=next((row["engine"] for one in reports for row in one.get("served") or ()), ""),
        speedups=_speedups(reports), acceptance=_acceptance(reports), times=[*map(_times, reports)],
        texts=_texts([result for result in results if result.shown], decode), categories=_categories(reports),
        lossless=first["lossless"], wrong=wrong_arms(reports), judged=judgements(reports), resolution=resolution(first),
        same=min(report["lossless"]["identical"] for report in reports), most_that_differ=most_that_differ,
        overlaps=[overlap_sentence(kind, one) for kind, one in first.get("overlap", {}).items()],
        first=first, sentences=_sentences(reports),
    )  # fmt: skip


def _counted(reports: Sequence[Report]) -> Table:
    """The variants of τ in other papers, and the conditional acceptance at the first depths."""
    depths = range(min(6, max(len(report["acceptance_given_previous"]) for report in reports)))

    def right(depth: int, report: Report) -> str:
        rows = report["acceptance_given_previous"]
        return f"{rows[depth]['accepted']:.2f}" if depth < len(rows) else ""

    often = "how often the draft is right here, where it was right before"
    deeper = {f"depth {depth + 1}": (often, partial(right, depth)) for depth in depths}
    return filled({**COUNTED, **deeper}, reports)


def _categories(reports: Sequence[Report]) -> list[tuple[str, Table]]:
    """By category, what it is and the table of its figures."""
    names = ("method", "tokens a pass", "accepted", "drafted a pass", "speed-up [95 %]", "without loops [95 %]")
    columns, found = {name: METHODS[name] for name in names}, []
    for name, mine in reports[0]["by_category"].items():
        rows = [{**report["by_category"][name], "method": report["method"]} for report in reports]
        found.append((f"{name}, {mine['prompts']} of the prompts: {loops_text(mine['loops'])}", filled(columns, rows)))
    return found


def _sentences(reports: Sequence[Report]) -> list[str]:
    first = reports[0]
    left_out = [f"Left out: {turn['prompt_id']} ({turn['reason']})." for turn in first.get("skipped", [])]
    lines = [*plain_sentence(first), *map(method_sentence, reports), *drafter_lines(first), *left_out]
    return [line for line in lines if line and line != "```"]


# -------------------------------------------------------------------------------------------------------- plots


def _speedups(reports: Sequence[Report]) -> Mapping[str, Any]:
    """Every timed method's median speed-up over plain decoding with its interval, on one axis, a row for each.

    An interval that is wider by far is cut.
    """
    timed = [(place, one["method"], one["speedup"]) for place, one in enumerate(reports)
             if one["speedup"]["median"] is not None]  # fmt: skip
    highest = max((speedup["ci95"][1] for *_, speedup in timed), default=0)
    most = max(1.2, min(highest, 2.5 * max((speedup["median"] for *_, speedup in timed), default=0)))
    step = 0.25
    while most / step > 6:
        step *= 2

    def across(speed: float) -> float:
        return _across(min(1, speed / most), RIGHT)

    rows = []
    for line, (place, method, speedup) in enumerate(timed):
        low, high = speedup["ci95"]
        places = {"low": across(low), "high": across(high), "middle": across(speedup["median"]), "y": ROW * line + 30}
        said = {"method": method, "said": interval_text(speedup), "place": place, "cut": high > most}
        rows.append({**places, **said})
    ticks = [(across(step * count), f"{step * count:g}×") for count in range(int(most / step) + 1)]
    return {"rows": rows, "ticks": ticks, "even": across(1), "bottom": ROW * max(1, len(timed))}


def _acceptance(reports: Sequence[Report]) -> Mapping[str, Any]:
    """The share of rounds accepted to each depth, among rounds that drafted that deep, as a line for each method."""
    deepest = max([2, *(len(report["acceptance_by_position"]) for report in reports)])

    def across(depth: float) -> float:
        return _across((depth - 1) / (deepest - 1))

    lines = []
    for report in reports:
        points, table = [], report["acceptance_by_position"]
        for row in table:
            where = f"depth {row['position']:.0f} in {100 * row['accepted']:.0f} % of {row['rounds']} rounds"
            scale = round(0.4 + 0.6 * row["rounds"] / table[0]["rounds"], 2)
            y = round(HEIGHT * (1 - row["accepted"]), 1)
            points.append((across(row["position"]), y, f"{report['method']}: {where}", scale))
        lines.append(points)
    shares = [(HEIGHT * (1 - share), f"{100 * share:.0f} %") for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    ticks = [(across(depth), str(depth)) for depth in range(1, deepest + 1, -(-deepest // 12))]
    frame = {"left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT}
    return {"lines": lines, "shares": shares, "ticks": ticks, **frame}


def _across(share: float, left: float = LEFT) -> float:
    """The horizontal place of a share of the axis."""
    return round(left + share * (WIDTH - RIGHT - left), 1)


def _times(report: Report) -> tuple[str, list[tuple[str, float, str]]]:
    """The method, and by part of a round its share of the decoding time in percent, also in words."""
    total = sum(report["seconds"].values()) or 1.0
    shares = ((part, 100 * max(0.0, report["seconds"][part]) / total) for part in PARTS)
    return report["method"], [(part, round(share, 2), f"{part} {share:.0f} %") for part, share in shares]


# -------------------------------------------------------------------------------------------------------- texts


class Pieces:
    """Texts of single tokens. A token that holds part of a character or a space depends on the tokens before it."""

    def __init__(self, decode: Decode, anchor: int):
        self._decode, self._anchor = decode, anchor
        self._before = len(decode([anchor]))
        self.known: dict[int, str] = {}

    def of(self, token: int) -> str:
        """The text of one token after the `anchor`, an arbitrary token."""
        if token not in self.known:
            self.known[token] = self._decode([self._anchor, token])[self._before :]
        return self.known[token]

    def along(self, tokens: Sequence[int]) -> list[str]:
        """The text split by token; the parts concatenate to the text."""
        parts, said = [], 0
        for end in range(1, len(tokens) + 1):
            text = self._decode(tokens[:end])
            whole = end == len(tokens) or not text.endswith("\ufffd")
            parts.append(text[said:] if whole else "")
            said = len(text) if whole else said
        return parts


def _texts(shown: Sequence[PromptResult], decode: Decode) -> Mapping[str, Any] | None:
    """All texts with recorded rounds, and the data of their trees for the script; None without any."""
    if not shown:
        return None
    pieces = Pieces(decode, shown[0].answer[0])
    trees: dict[str, list[list[object]]] = {}
    articles = []
    for number, result in enumerate(shown):
        for method, rounds in result.shown.items():
            articles.append((f"{number}/{method}", _rounds(rounds, pieces)))
            trees[f"{number}/{method}"] = [_tree(r, pieces) for r in rounds]
    prompts = [{"id": r.prompt_id, "category": r.category, "asked": decode(r.prompt)[-ASKED:]} for r in shown]
    data = {"trees": trees, "pieces": {str(token): text for token, text in pieces.known.items()}}
    return {"prompts": prompts, "methods": list(shown[0].shown), "articles": articles, "data": data}


def _rounds(rounds: Sequence[ShownRound], pieces: Pieces) -> list[Mapping[str, Any]]:
    """The rounds of one text, each with its committed tokens and the first rejected ones."""
    parts, found = iter(pieces.along([token for r in rounds for token in r.tokens])), list[Mapping[str, Any]]()
    for number, r in enumerate(rounds):
        own = [next(parts) for _ in r.tokens]
        title = f"round {number}: {len(r.drafted)} drafted, {r.accepted} accepted" if number else "the prefill"
        said = {"accepted": own[: r.accepted], "own": own[r.accepted :]}
        found.append({"title": title, "rejected": "".join(map(pieces.of, rejected_tokens(r))), **said})
    return found


def rejected_tokens(r: ShownRound) -> list[int]:
    """The drafted tokens after the accepted path, along each node's first child: the rest of a chain."""
    node = r.path[-1] if r.path else ROOT
    found: list[int] = []
    while len(found) < REJECTED:
        child = next((i for i, parent in enumerate(r.parents) if parent == node), None)
        if child is None:
            break
        found.append(r.drafted[child])
        node = child
    return found


def _tree(r: ShownRound, pieces: Pieces) -> list[object]:
    """Data for the script: tokens, parents and accepted nodes of the draft, and the target's own tokens."""
    own = list(r.tokens[r.accepted :])
    for token in (*r.drafted, *own):
        pieces.of(token)
    return [r.drafted, r.parents, r.path, own]
