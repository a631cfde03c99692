"""Compare every figure of a page with the committed JSON. Light: needs no torch.

`results/figures.json` has for a page its entries. `words` are a piece of the page, in which each `#` is a figure.
`from` says in order what they are made of: Python expressions over the JSON files of `results/`, by name, with keys as
attributes. A record with an interval, or a list, is as many figures as it has. A figure agrees if it is its value,
rounded to the digits that the page shows. `because` is for figures that no JSON has: `words` say them themselves, and
it names the command or the reason. On a page that is to be complete, a figure that no entry covers has no source.

Figures are numbers in sentences and tables. Those in code, links and names (H100, 7B, EAGLE-3), of arXiv, and those
between the marks of a table (see fill_tables.py), which are compared there, do not count.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

RESULTS = Path(__file__).parent / "results"
NUMBER = r"\d[\d,]*\d(?:\.\d+)?|\d+(?:\.\d+)*"
FIGURE = re.compile(rf"(?<!\w)(?<!\w[-./])(?!\d{{4}}\.\d{{5}})(?:{NUMBER})(?![\w⁶])")
AWAY = re.compile(r"<!-- [^>]* begin -->.*?end -->|^```.*?^```$|(?<=\])\([^)\s]+\)|`[^`\n]*`", re.DOTALL | re.MULTILINE)
INTERVAL = re.compile(r"(\d+\.\d+)\s?×?\s\[\+?(\d+\.\d+),\s\+?(\d+\.\d+)\]")
KNOWN = {"abs": abs, "len": len, "max": max, "mean": mean, "median": median, "min": min, "round": round, "sum": sum,
         "zip": zip}  # fmt: skip
MIDDLES = ("median", "mean", "ratio", "value")


class Record(dict[str, Any]):
    """An object of a JSON file; its keys are attributes too."""

    __getattr__ = dict.__getitem__


def records(folder: Path = RESULTS) -> dict[str, Any]:
    """The content of every JSON file of a folder, by its name without .json."""
    return {file.stem: json.loads(file.read_text(), object_hook=Record) for file in sorted(folder.glob("*.json"))}


def cleaned(page: str) -> str:
    """What of a page's text can hold figures, on one line."""
    return " ".join(AWAY.sub(lambda found: re.sub(r"\d", "", found[0]) if found[0][0] == "`" else " ", page).split())


def check(page: str, entries: Sequence[Mapping[str, Any]], known: Mapping[str, Any], *, complete: bool) -> list[str]:
    """What is wrong with the figures of a page's text, a sentence each. complete: every figure needs a source."""
    text = cleaned(page)
    sourced: set[int] = set()
    wrong = []
    for entry in entries:
        pieces = [re.escape(piece) for piece in cleaned(entry["words"]).split("#")]
        places = [*re.finditer(rf"(?<![\w.,])(?:{f'({NUMBER})'.join(pieces)})(?![\w⁶])", text)]
        if not places:
            wrong.append(f"not on the page: {entry['words']}")
        for found in places:
            sourced |= {*range(*found.span())}
            wrong += [] if "because" in entry else compare(found, entry, known)
    lost = [one for one in FIGURE.finditer(text) if complete and one.start() not in sourced]
    return wrong + [f"{one[0]} has no source: {text[max(0, one.start() - 60) : one.end()]}" for one in lost]


def compare(found: re.Match[str], entry: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Where the figures of an entry's words are not those of its sources."""
    values = [value for source in entry["from"] for value in figures_of(eval(source, {**KNOWN, **known}))]
    said = [figure.replace(",", "") for figure in found.groups()]
    made = [f"{value:.{len(figure.partition('.')[2])}f}" for figure, value in zip(said, values, strict=False)]
    return [] if (said, len(said)) == (made, len(values)) else [f"{found[0]}: the record has {made or values}"]


def figures_of(value: Any) -> list[float]:
    """A number, or those of a list, or of a median, mean or ratio with its interval."""
    if isinstance(value, Mapping):
        return [next(value[name] for name in MIDDLES if name in value), *value["ci95"]]
    return [*value] if isinstance(value, Sequence) else [value]


def intervals(known: Any) -> Iterator[tuple[str, ...]]:
    """Every median or mean with its interval that is in a record, as pages show it."""
    if isinstance(known, Mapping):
        if known.get("ci95") and not known.keys().isdisjoint(MIDDLES):
            yield tuple(f"{value:.2f}" for value in figures_of(known))
        known = list(known.values())
    if isinstance(known, list):
        for each in known:
            yield from intervals(each)
