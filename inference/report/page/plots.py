"""The page's plots as SVG, coloured by the page's styles for light and dark mode."""

from collections.abc import Sequence

from inference.report.page.markup import Markup, joined, tag
from inference.report.wording import Report

WIDTH, LEFT, RIGHT, ROW = 640, 150, 60, 26
PARTS = ("draft", "verify", "structure", "other")  # the parts of a round's time (see `parts_of_time`)


def speedups(reports: Sequence[Report]) -> Markup:
    """Every method's median speed-up over plain decoding with its interval, on one axis."""
    timed = [(place, one) for place, one in enumerate(reports) if one["speedup"]["median"] is not None]
    most = max([1.2, *(one["speedup"]["ci95"][1] for _, one in timed)])
    rows = []
    for line, (place, report) in enumerate(timed):
        y, speedup = ROW * line + ROW / 2, report["speedup"]
        low, middle, high = (_x(value, most) for value in (speedup["ci95"][0], speedup["median"], speedup["ci95"][1]))
        colour = f"c{place % 8}"
        rows += [
            _label(report["method"], y),
            tag("line", x1=low, x2=high, y1=y, y2=y, class_=f"interval {colour}"),
            tag("circle", cx=middle, cy=y, r=5, class_=colour),
            _text(f"{speedup['median']:.2f}×", high + 8, y),
        ]
    height = ROW * max(1, len(timed))
    one = _x(1.0, most)
    rows.append(tag("line", x1=one, x2=one, y1=0, y2=height, class_="even"))
    rows.append(_text("1×: as fast as without a drafter", one + 4, height + 14))
    return _svg(rows, height + 22, "Speed-up of every method over plain decoding, with its 95 % interval")


def time_split(reports: Sequence[Report]) -> Markup:
    """Every method's decoding time, split by part of a round."""
    rows = []
    for line, report in enumerate(reports):
        total = sum(report["seconds"].values()) or 1.0
        x, y = float(LEFT), ROW * line + 4
        rows.append(_label(report["method"], ROW * line + ROW / 2))
        for place, part in enumerate(PARTS):
            width = max(0.0, report["seconds"][part]) / total * (WIDTH - LEFT - RIGHT)
            said = tag("title", f"{part}: {100 * report['seconds'][part] / total:.0f} %")
            rows.append(tag("rect", said, x=f"{x:.1f}", y=y, width=f"{width:.1f}", height=ROW - 8, class_=f"c{place}"))
            x += width
    height = ROW * len(reports)
    for place, part in enumerate(PARTS):
        rows.append(tag("rect", x=LEFT + 110 * place, y=height + 6, width=12, height=12, class_=f"c{place}"))
        rows.append(_text(part, LEFT + 110 * place + 18, height + 12))
    return _svg(rows, height + 24, "Where the time of decoding goes")


def acceptance(reports: Sequence[Report], height: int = 200) -> Markup:
    """The share of rounds accepted to each depth, among rounds that drafted that deep."""
    deepest = max([2, *(len(report["acceptance_by_position"]) for report in reports)])
    lines = []
    for share in (0.0, 0.5, 1.0):
        y = height * (1 - share)
        lines.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(_text(f"{100 * share:.0f} %", LEFT - 8, y, "end"))
    for place, report in enumerate(reports):
        points = [
            (LEFT + (row["position"] - 1) / (deepest - 1) * (WIDTH - LEFT - RIGHT), height * (1 - row["accepted"]))
            for row in report["acceptance_by_position"]
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        lines.append(tag("polyline", tag("title", report["method"]), points=path, class_=f"line c{place % 8}"))
        for (x, y), row in zip(points, report["acceptance_by_position"], strict=True):
            said = (
                f"{report['method']}: depth {row['position']:.0f} in {100 * row['accepted']:.0f} % of {row['rounds']}"
            )
            title = tag("title", f"{said} rounds")
            lines.append(tag("circle", title, cx=f"{x:.1f}", cy=f"{y:.1f}", r=3, class_=f"c{place % 8}"))
    lines.append(_text("depth in the draft: 1", LEFT, height + 16))
    lines.append(_text(str(deepest), WIDTH - RIGHT, height + 16, "end"))
    return _svg(lines, height + 26, "How deep drafts were accepted")


def _x(value: float, most: float) -> float:
    return round(LEFT + min(value / most, 1.0) * (WIDTH - LEFT - RIGHT - 20), 1)


def _label(text: str, y: float) -> Markup:
    return _text(text, LEFT - 8, y, "end")


def _text(text: str, x: float, y: float, anchor: str = "start") -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, dominant_baseline="middle")


def _svg(content: Sequence[Markup], height: float, said: str) -> Markup:
    box = f"0 -6 {WIDTH} {height + 8:.0f}"
    return tag("figure", tag("svg", *content, viewBox=box, role="img", aria_label=said), tag("figcaption", said, "."))


def legend(reports: Sequence[Report]) -> Markup:
    """The colour of each method."""
    keys = [tag("span", "● ", class_=f"c{place % 8}") + tag("span", one["method"]) for place, one in enumerate(reports)]
    return tag("p", joined(*(tag("span", Markup(key), class_="key") for key in keys)), class_="legend")
