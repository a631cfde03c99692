"""A paper's results as Markdown and as a picture, from the JSON alone. Light: it needs no torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from papers.judging import DECIDED, FAILS, HOLDS, NOT_RUN, UNDECIDED, UNFIT, statements

MARKS = {"holds": "**holds**", "does not hold": "**does not hold**", "undecided": "undecided", "not run": "not run"}
ALONE = "°"  # a decision that does not stand by Holm's correction over all claims of its entry


def markdown(record: Mapping[str, Any]) -> str:
    """All tables of a paper: its own figures, ours on every target, and the verdicts on its claims."""
    entries = record["entries"]
    lines = measured(record).splitlines()
    for key in dict.fromkeys(key for entry in entries.values() for key in entry["tables"]):
        lines += ["", *table(key, {name: entry["tables"].get(key) for name, entry in entries.items()})]
    return "\n".join(lines) + "\n"


def measured(record: Mapping[str, Any]) -> str:
    """A line for every entry."""
    return "".join(f"{said(name, entry)}\n" for name, entry in record["entries"].items())


def said(name: str, entry: Mapping[str, Any]) -> str:
    """What was measured, and the number of verdicts of each kind."""
    models = ", ".join(kind for kind, where in entry["models"].items() if where)
    claims = [claim for one in entry["tables"].values() for claim in one["claims"]]
    verdicts = statements(claims)
    decided = sum(claim["verdict"] in DECIDED for claim in claims)
    counted = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in (HOLDS, FAILS, UNDECIDED, NOT_RUN))
    times = f", times of the beginnings of up to {entry['timed']} of them" if entry["timed"] else ""
    standing = sum(claim.get("stands", False) for claim in claims)
    said = f"- `{name}` ({models}): {entry['prompts']} prompts ({', '.join(entry['categories'])}) × {entry['length']}, "
    judged = (
        f" The paper's statements: {counted}. {standing} of {decided} decisions, ours too, stand by Holm's "
        "correction over all."
    )
    return f"{said}{entry['dtype']}{times}.{judged if verdicts else ''}"


def table(key: str, found: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """One table: a line for every row, a column for every quantity and target, then the claims."""
    here = {name: one for name, one in found.items() if one is not None}
    first = next(iter(here.values()))
    lines = [f"### {first['title']}", ""]
    lines += [first["note"], ""] if first["note"] else []
    own = [f"`{name}` {one['measured']}" for name, one in here.items() if one.get("measured")]
    lines += [f"Here: {'; '.join(own)}.", ""] if own and not first["never"] else []
    if first["never"]:
        return [*lines, f"Not run: {first['never']}."]
    labels = [(name, quantity) for name, one in here.items() for quantity in one["quantities"]]
    shown = [
        (name, quantity) for name, quantity in labels
        if any(row["here"].get(quantity) is not None for row in here[name]["rows"].values())
    ]  # fmt: skip
    columns = [f"{name}: {here[name]['quantities'][quantity]['label']}" for name, quantity in shown]
    columns = columns or ["here"]
    rows = {name: row for one in reversed(here.values()) for name, row in one["rows"].items()}
    if rows:
        lines.append("| | " + " | ".join([*(f"paper: {column}" for column in first["columns"]), *columns]) + " |")
        lines.append("|---" * (1 + len(first["columns"]) + len(columns)) + "|")
    for name in dict.fromkeys(name for one in here.values() for name in one["rows"]):
        row = rows[name]
        cells = [cell(here[entry], name, quantity) for entry, quantity in shown]
        reason = row["never"] if all(one["rows"].get(name, row)["never"] for one in here.values()) else ""
        cells = [f"not run: {reason}", *[""] * (len(columns) - 1)] if reason else cells or [""]
        own = [*row["paper"], *["–"] * (len(first["columns"]) - len(row["paper"]))]
        lines.append("| " + " | ".join([name, *own, *cells]) + " |")
    return [*lines, "", *(line for line in claims(here))]


def cell(table: Mapping[str, Any], row: str, quantity: str) -> str:
    value = table["rows"].get(row, {"here": {}})["here"].get(quantity)
    return "–" if value is None else f"{value:.{table['quantities'][quantity]['digits']}f}"


def claims(here: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every claim with its verdict on every target; those of times that decide nothing here on one line."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, one in here.items():
        for claim in one["claims"]:
            found.setdefault(claim["says"], {})[name] = claim
    lines, untimed = [], []
    for says, own in found.items():
        said = f"{says} (ours)" if all(claim["ours"] for claim in own.values()) else says
        if all(claim.get("reason", "") == UNFIT for claim in own.values()):
            untimed.append(said)
        else:
            lines.append(f"- {said}: {'; '.join(f'{name} {verdict(claim)}' for name, claim in own.items())}")
    return lines + ([f"- {UNFIT[0].upper()}{UNFIT[1:]}: {'; '.join(untimed)}"] if untimed else [])


def verdict(claim: Mapping[str, Any]) -> str:
    """The verdict in words, with the figures behind it: the terms, the interval of the difference that decides (the
    weakest step, if there are several), and the number of conversations."""
    mark = MARKS[claim["verdict"]]
    if claim["verdict"] == "not run":
        return f"{mark} ({claim['reason']})"
    alone = "" if claim["stands"] or claim["verdict"] == "undecided" else ALONE
    terms = " → ".join(number(value) for value in claim["values"])
    low, high = map(number, claim["ci95"])
    needed = f", decided by about {claim['needed']}" if claim["needed"] else ""
    return f"{mark}{alone} ({terms}; [{low}, {high}], n = {claim['prompts']}{needed})"


def number(value: float) -> str:
    """Three significant digits."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def plot(record: Mapping[str, Any]) -> Figure | None:
    """A panel for each table with a plot: its quantity over the rows' x, with each of its lines on every target."""
    entries = record["entries"]
    keys = [key for key in dict.fromkeys(key for entry in entries.values() for key in entry["tables"])
            if any(points(entry["tables"].get(key)) for entry in entries.values())]  # fmt: skip
    if not keys:
        return None
    across = min(3, len(keys))
    down = -(-len(keys) // across)
    figure = Figure(figsize=(5 * across, 3.6 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for key, axes in zip(keys, panels, strict=False):
        for name, entry in entries.items():
            for line, places in points(entry["tables"].get(key)).items():
                axes.plot(*zip(*places, strict=True), "o-", label=f"{name}: {line}" if line else name)
        one = next(entry["tables"][key] for entry in entries.values() if points(entry["tables"].get(key)))
        known = one["quantities"][one["plot"]]["label"]
        axes.set(title=one["title"].partition(":")[0], xlabel=one["xlabel"], ylabel=known)
        axes.legend(fontsize=7)
    for axes in panels[len(keys) :]:
        axes.axis("off")
    return figure


def points(table: Mapping[str, Any] | None) -> dict[str, Sequence[tuple[float, float]]]:
    """The points of each line of a plot."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in table["rows"].values() if table and table["plot"] else ():
        assert table is not None
        value = row["here"].get(table["plot"])
        if row["x"] is not None and value is not None:
            found.setdefault(row["line"], []).append((row["x"], value))
    return {line: sorted(places) for line, places in found.items()}
