"""Write the figures of results/ into the tables of README.md, docs/ and results/, or compare them.

    python benchmarks/fill_tables.py [--check]

A page marks its table with two comments. The header of the table names its columns:

    <!-- demo table: begin -->
    | method | identical | τ |
    …
    <!-- demo table: end -->

Every row under the header is replaced, baselines first. The tables of the record (bench_real.py) are between "float32
table: begin" and "float32 table: end", likewise for each entry. The marks "float32 summary" hold the same tables
without categories. The marks "fresh dtypes" hold a table of both dtypes, of the entries float32_fresh and
bfloat16_fresh. The tables of layouts_cpu.json are between "NAME layouts: begin" and "NAME layouts: end", those of
trainers_cpu.json between "5 minutes trainers: begin" and its end. The verdicts on a paper's claims (paper.py) are
between "gsd tables: begin" and "gsd tables: end", likewise for each paper.

--check writes nothing, and ends with status 1 if anything differs. It compares all that pages have with all JSON files:
every marked table, every figure of the pages in COMPLETE (see figures.py), and every median with its interval, such as
1.54× [1.44, 2.07], of all pages. The JSON files are compared with what they are made of: the papers' verdicts
and intervals with their counts, a record's figures with its raw data (record_raw.py).
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from figures import INTERVAL, RESULTS, check, intervals, records
from papers.judging import judge_entry
from papers.keeping import counts_file, read_kept
from papers.writing import markdown, measured
from record_raw import entry_of, figures_of_requests, judged_trainers, of_requests, raw_file, read_raw
from record_tables import by_dtype, layouts, requests, summary, tables, trainers

from outrider.base.words import Columns, fill_table
from outrider.cli import report_crash
from outrider.inference.report.tables import COUNTS, METHODS, arms_and_methods
from outrider.inference.report.types import MethodReport, reports_in

COLUMNS: Columns = {
    **METHODS,
    "τ": METHODS["tokens a pass"],
    "v_d": METHODS["accepted"],
    "r_d": METHODS["from drafter"],
    "HM": COUNTS["HM"],
    "identical": METHODS["same text as transformers"],
    "drafted/round": METHODS["drafted a pass"],
}
SHAPES: Mapping[str, Callable[[Any], str]] = {
    "table": tables, "summary": summary, "layouts": layouts, "trainers": trainers, "requests": requests,
}  # fmt: skip
PLACE = re.compile(r"(<!-- ([^>]+): begin -->\n)(.*?)(<!-- \2: end -->)", re.DOTALL)
ROOT = Path(__file__).parents[1]
COMPLETE = ("README.md", "docs/results.md", "docs/deploy.md", "benchmarks/results/smollm2.md")  # all is sourced


def makers(known: Mapping[str, Any]) -> dict[str, Callable[[str], str]]:
    """All tables of the JSON files by their marks, each from what is there now. known: see `figures.records`."""
    found: dict[str, Callable[[str], str]] = {
        "demo table": lambda old: under_header(reports_in(known["demo_cpu"]), old)
    }
    alike: dict[str, list[Any]] = {}
    for content in known.values():
        if "paper" in content:
            for shape, make in {"tables": markdown, "summary": measured}.items():
                found[f"{content['paper']} {shape}"] = partial(_ignoring, make, content)
        for name, entry in content["entries"].items() if "entries" in content and "paper" not in content else ():
            found |= {f"{name} {shape}": partial(_ignoring, make, entry) for shape, make in SHAPES.items()}
            alike.setdefault(name.partition("_")[2], []).append(entry)
    return found | {f"{label} dtypes": partial(_ignoring, by_dtype, own) for label, own in alike.items()}


def _ignoring(make: Callable[[Any], str], content: Any, _: str) -> str:
    return make(content)


def under_header(reports: Sequence[MethodReport], table: str) -> str:
    """`table` with the rows of `reports`. Raises `ValueError` for a column that they do not have."""
    header, rule, *_ = table.splitlines()
    return "\n".join([header, rule, *rows([name.strip() for name in header.strip("|").split("|")], reports), ""])


def filled_page(page: str, known: Mapping[str, Any]) -> str:
    """`page` with all tables that it marks. Raises `ValueError` for a table or column that no JSON file has."""
    own = makers(known)

    def table(found: re.Match[str]) -> str:
        if found[2] not in own:
            raise ValueError(f"{found[2]}: no JSON file has this table")
        return found[1] + own[found[2]](found[3]) + found[4]

    return PLACE.sub(table, page)


def rows(names: Sequence[str], reports: Sequence[MethodReport]) -> list[str]:
    """The lines of a table with these columns: both baselines, then the methods. Raises `ValueError`."""
    if unknown := {*names} - {*COLUMNS}:
        raise ValueError(f"column {', '.join(sorted(unknown))}: expected some of {', '.join(COLUMNS)}")
    plain, *others = arms_and_methods(reports)
    table = fill_table({name: COLUMNS[name] for name in names}, [{**plain, "method": "autoregressive"}, *others])
    return table.markdown()[2:]


def pages() -> dict[str, str]:
    """The text of every page by its path."""
    found = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *RESULTS.glob("*.md")]
    return {str(page.relative_to(ROOT)): page.read_text() for page in sorted(found)}


def check_all(texts: Mapping[str, str], known: Mapping[str, Any]) -> list[str]:
    """Where the pages and the JSON files differ, a sentence each. texts: by path; known: see `figures.records`."""
    sources, wrong = json.loads((RESULTS / "figures.json").read_text()), []
    have = set(intervals([*known.values()]))
    for page, text in texts.items():
        wrong += [f"{page}: JSON files have other tables"] if filled_page(text, known) != text else []
        wrong += [f"{page}: {one}" for one in check(text, sources.get(page, ()), known, complete=page in COMPLETE)]
        lost = (found[0] for found in INTERVAL.finditer(text) if found.groups() not in have)
        wrong += [f"{page}: no JSON file has {one}" for one in lost]
    return wrong


def differences(known: Mapping[str, Any], raw: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The entries of JSON files that are not what they are made of, a sentence each. raw: see `raw_data`."""
    return [f"{name}.json: {entry} is not what its data say" for name, entry, said, again in again_of(known, raw)
            if not alike(json.loads(json.dumps(again)), said)]  # fmt: skip


def again_of(known: Mapping[str, Any], raw: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any, Any]]:
    """The name of a file and of an entry, the entry, and the same made again."""
    for name, content in known.items():
        for label, entry in content["entries"].items() if "paper" in content else ():
            yield name, label, entry, judge_entry(entry, read_kept(counts_file(RESULTS / "-", content["paper"], label)))
        for label in {**raw[name], **content["entries"]} if name in raw else ():
            yield name, label, content["entries"].get(label), raw[name].get(label) and entry_of(raw[name][label])
        for label, entry in content.get("entries", {}).items():
            if "turns" in entry:
                yield name, label, entry["arms"], figures_of_requests(entry)
            if any("rounds" in arm for arm in entry.get("arms", {}).values()):
                yield name, label, entry["arms"], judged_trainers(entry["arms"])
        every = content["turns"] if isinstance(content.get("turns"), list) else []
        for arm, count in {(turn["arm"], turn["in_flight"]): 0 for turn in every}:
            turns = [turn for turn in every if (turn["arm"], turn["in_flight"]) == (arm, count)]
            said = content["arms"][arm][f"{count}"]
            yield name, f"{arm} {count}", said, {**said, **of_requests(turns)}


def raw_data(known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The raw data of the records that have them, by record and entry."""
    found = {name: read_raw(raw_file(RESULTS / f"{name}.json")) for name in known}
    return {name: own for name, own in found.items() if own}


def alike(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, figures to nine digits: sums depend on the machine in the last ones."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, abs_tol=1e-12)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    both = isinstance(one, list) and isinstance(other, list) and len(one) == len(other)
    return all(map(alike, one, other)) if both else bool(one == other)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    options, known = parser.parse_args(arguments), records()
    if options.check:
        sys.exit("\n".join(check_all(pages(), known) + differences(known, raw_data(known))) or None)
    for page, text in pages().items():
        if (new_text := filled_page(text, known)) != text:
            (ROOT / page).write_text(new_text)


if __name__ == "__main__":
    with report_crash():  # status 1 says what was found
        main(sys.argv[1:])
