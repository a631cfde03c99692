"""The page's plots as SVG and HTML, coloured by the page's styles for light and dark mode."""

from collections.abc import Sequence

from inference.report.page.markup import Markup, tag
from inference.report.wording import Report, interval_text

WIDTH, LEFT, RIGHT, ROW = 420, 52, 14, 46
PARTS = ("draft", "verify", "structure", "other")  # the parts of a round's time (see `parts_of_time`)
MARKS = (  # methods are told apart by their shapes, too
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0", "M-4.5-4.5h9v9h-9z", "M0-6l6 10h-12z", "M0-6.5l6 6.5-6 6.5-6-6.5z",
    "M0 6l-6-10h12z",
)  # fmt: skip


def speedups(reports: Sequence[Report]) -> Markup:
    """Every method's median speed-up over plain decoding with its interval, on one axis."""
    timed = [(place, one) for place, one in enumerate(reports) if one["speedup"]["median"] is not None]
    highest = max((one["speedup"]["ci95"][1] for _, one in timed), default=0)
    # an interval that is wider by far is cut, with an arrow
    most = max(1.2, min(highest, 2.5 * max((one["speedup"]["median"] for _, one in timed), default=0)))
    bottom, step = ROW * max(1, len(timed)), 0.25
    while most / step > 6:
        step *= 2
    ticks = [step * count for count in range(int(most / step) + 1)]
    drawn = [part for tick in ticks for part in _tick(_across(tick / most, RIGHT), f"{tick:g}×", bottom)]
    for line, (place, report) in enumerate(timed):
        y, speedup = ROW * line + 30, report["speedup"]
        ends = (*speedup["ci95"], speedup["median"], 1)
        low, high, middle, even = (_across(min(1, value / most), RIGHT) for value in ends)
        drawn += [
            tag("line", x1=even, x2=even, y1=y - 9, y2=y + 16, class_="even"),  # it ends below the names
            _text(report["method"], 2, y - 17),
            _text(interval_text(speedup), WIDTH - 2, y - 17, "end"),
            tag("line", x1=low, x2=high, y1=y, y2=y, class_=f"interval c{place % 8}"),
            _mark(place, middle, y),
            *([tag("path", d=f"M{high + 8} {y}l-10-6v12z", class_=f"c{place % 8}")] if ends[1] > most else []),
        ]
    said = "Speed-up over plain decoding (dashed: 1×): the median over prompts with its 95 % interval"
    return _figure(drawn, bottom + 24, said)


def time_split(reports: Sequence[Report]) -> Markup:
    """Every method's decoding time, split by part of a round."""
    rows = []
    for report in reports:
        total = sum(report["seconds"].values()) or 1.0
        shares = {part: 100 * max(0.0, report["seconds"][part]) / total for part in PARTS}
        said = ", ".join(f"{part} {share:.0f} %" for part, share in shares.items())
        bar = (tag("span", class_=part, style=f"flex-grow: {share:.2f}") for part, share in shares.items())
        rows.append(tag("p", report["method"], tag("small", said)))
        rows.append(tag("div", *bar, class_="bar", role="img", aria_label=said))
    axis = tag("div", *(tag("span", f"{share} %") for share in (0, 25, 50, 75, 100)), class_="axis")
    keys = (tag("span", tag("i", class_=part), part, class_="key") for part in PARTS)
    said = "Where the time of decoding goes: in the drafter, in the target's pass, in building and pruning drafts"
    return tag("figure", *rows, axis, tag("div", *keys), tag("figcaption", said, "."), class_="split")


def acceptance(reports: Sequence[Report], height: int = 220) -> Markup:
    """The share of rounds accepted to each depth, among rounds that drafted that deep."""
    deepest = max([2, *(len(report["acceptance_by_position"]) for report in reports)])
    drawn = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = height * (1 - share)
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(_text(f"{100 * share:.0f} %", LEFT - 8, y, "end"))
    for depth in range(1, deepest + 1, -(-deepest // 12)):
        drawn += _tick(_across((depth - 1) / (deepest - 1)), str(depth), height)
    for place, report in enumerate(reports):
        table = report["acceptance_by_position"]
        points = [(_across((row["position"] - 1) / (deepest - 1)), height * (1 - row["accepted"])) for row in table]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(tag("polyline", points=path, class_=f"line c{place % 8}"))
        for (x, y), row in zip(points, table, strict=True):
            said = f"depth {row['position']:.0f} in {100 * row['accepted']:.0f} % of {row['rounds']} rounds"
            drawn.append(
                _mark(place, x, y, f"{report['method']}: {said}", 0.4 + 0.6 * row["rounds"] / table[0]["rounds"])
            )
    keys = (tag("span", tag("svg", _mark(place, 7, 7), viewBox="0 0 14 14"), one["method"], class_="key")
            for place, one in enumerate(reports))  # fmt: skip
    drawn.append(_text("depth in the draft", WIDTH / 2, height + 36, "middle"))
    said = "Share of drafts accepted so deep, of those that reached this depth; small marks: few of them"
    return _figure(drawn, height + 46, said, tag("p", *keys))


def _across(share: float, left: float = LEFT) -> float:
    """The horizontal place of a share of the axis."""
    return round(left + share * (WIDTH - RIGHT - left), 1)


def _tick(x: float, text: str, bottom: float) -> list[Markup]:
    return [tag("line", x1=x, x2=x, y1=0, y2=bottom + 4, class_="grid"), _text(text, x, bottom + 16, "middle")]


def _mark(place: int, x: float, y: float, said: str = "", scale: float = 1.0) -> Markup:
    move = f"translate({x:.1f} {y:.1f}) scale({scale:.2f})"
    return tag("path", tag("title", said), d=MARKS[place % 5], transform=move, class_=f"c{place % 8}")


def _text(text: str, x: float, y: float, anchor: str = "start") -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, dominant_baseline="middle")


def _figure(content: Sequence[Markup], height: float, said: str, *after: Markup) -> Markup:
    svg = tag("svg", *content, viewBox=f"0 -8 {WIDTH} {height + 10:.0f}", role="img", aria_label=said)
    return tag("figure", svg, *after, tag("figcaption", said, "."))
