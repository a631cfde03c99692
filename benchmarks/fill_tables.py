"""Write the figures of a report into the tables of README.md and docs/, or compare them.

    python benchmarks/fill_tables.py benchmarks/results/demo_cpu.json README.md docs/results.md

A page marks its table with two comments. The header of the table names its columns:

    <!-- demo table: begin -->
    | method | identical | τ |
    …
    <!-- demo table: end -->

Every row under the header is replaced, baselines first, and so is every figure of the form "`eesd_beta` τ 3.64"
elsewhere on the page. The tables of the record (bench_real.py) are between "float32 table: begin" and "float32 table:
end", likewise for each dtype. The marks "float32 summary" hold the same tables without categories. The marks "all
dtypes" hold a table of both dtypes. The tables of layouts_cpu.json are between "NAME layouts: begin" and "NAME layouts:
end", those of bench_trainers.py between "5 minutes trainers: begin" and its end. The verdicts on a paper's claims
(paper.py) are between "gsd tables: begin" and "gsd tables: end", likewise for each paper. --check writes nothing, and
ends with status 1 if a page differs from the report.

    python benchmarks/fill_tables.py --check

compares all that pages have with all JSON files of results/: every marked table, every figure of README.md and
docs/results.md (see figures.py), and every median with its interval, such as 1.54× [1.44, 2.07], of all pages. The
papers' verdicts and intervals are first made again from their counts.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import INTERVAL, RESULTS, check, intervals, records
from papers.judging import judge_entry
from papers.keeping import counts_file, read_kept
from papers.writing import markdown, measured
from record_tables import by_dtype, layouts, summary, tables, trainers

from outrider.base.words import Columns, filled
from outrider.cli import crashing
from outrider.inference.report.tables import COUNTED, METHODS, arms_and_methods

Report = Mapping[str, Any]
COLUMNS: Columns = {
    **METHODS,
    "τ": METHODS["tokens a pass"],
    "v_d": METHODS["accepted"],
    "r_d": METHODS["from drafter"],
    "HM": COUNTED["HM"],
    "drafted/round": METHODS["drafted a pass"],
}
BLOCK = re.compile(r"(<!-- demo table: begin -->\n)(.*?)(\n<!-- demo table: end -->)", re.DOTALL)
TAU = re.compile(r"`(\w+)` τ \d+\.\d\d")
MARK = re.compile(r"<!-- (.+?) (?:table|summary|layouts|dtypes|tables): begin -->")
ROOT = Path(__file__).parents[1]
COMPLETE = ("README.md", "docs/results.md")  # every figure has a source


def fill(page: str, reports: Sequence[Report]) -> str:
    """`page` with the figures of `reports`. Raises `ValueError` for a column or a method that they do not have."""
    tau = {report["method"]: report["tau"] for report in reports}

    def table(found: re.Match[str]) -> str:
        header, rule, *_ = found[2].splitlines()
        columns = [name.strip() for name in header.strip("|").split("|")]
        return found[1] + "\n".join([header, rule, *rows(columns, reports)]) + found[3]

    def figure(found: re.Match[str]) -> str:
        if found[1] not in tau:
            raise ValueError(f"{found[0]}: the report has {', '.join(tau)}")
        return f"`{found[1]}` τ {tau[found[1]]:.2f}"

    return TAU.sub(figure, BLOCK.sub(table, page))


def fill_record(page: str, entries: Mapping[str, Any]) -> str:
    """`page` with the tables of every entry that it has a place for. Raises `ValueError` where there is none."""
    shapes = {"table": tables, "summary": summary, "layouts": layouts, "dtypes": by_dtype, "trainers": trainers}
    places_of = {**entries, "all": entries}
    names = "|".join(map(re.escape, places_of))
    places = re.compile(rf"(<!-- ({names}) ({'|'.join(shapes)}): begin -->\n)(.*?)(<!-- \2 \3: end -->)", re.DOTALL)
    filled, count = places.subn(lambda found: found[1] + shapes[found[3]](places_of[found[2]]) + found[5], page)
    if not count:
        raise ValueError(f"no place for {', '.join(entries)}; expected <!-- {next(iter(entries))} table: begin -->")
    return filled


def fill_paper(page: str, record: Mapping[str, Any]) -> str:
    """`page` with all tables of a paper, or its summary. Raises `ValueError` where it has no place for them."""
    name = record["paper"]
    shapes = {"tables": markdown, "summary": measured}
    places = rf"(<!-- {name} ({'|'.join(shapes)}): begin -->\n)(.*?)(<!-- {name} \2: end -->)"
    filled, count = re.subn(places, lambda found: found[1] + shapes[found[2]](record) + found[4], page, flags=re.DOTALL)
    if not count:
        raise ValueError(f"no place for {name}; expected <!-- {name} tables: begin -->")
    return filled


def rows(names: Sequence[str], reports: Sequence[Report]) -> list[str]:
    """The lines of a table with these columns: both baselines, then the methods. Raises `ValueError`."""
    if unknown := {*names} - {*COLUMNS}:
        raise ValueError(f"column {', '.join(sorted(unknown))}: expected some of {', '.join(COLUMNS)}")
    plain, *others = arms_and_methods(reports)
    table = filled({name: COLUMNS[name] for name in names}, [{**plain, "method": "autoregressive"}, *others])
    return table.markdown()[2:]


def filled_from(content: Mapping[str, Any], page: str) -> str:
    """`page` with the tables of a JSON file of this content. Raises `ValueError` where it has no place for them."""
    if "paper" in content:
        return fill_paper(page, content)
    if "entries" in content:
        return fill_record(page, content["entries"])
    return fill(page, content.get("reports", [content]))


def pages() -> dict[str, str]:
    """The text of every page by its path."""
    found = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *RESULTS.glob("*.md")]
    return {str(page.relative_to(ROOT)): page.read_text() for page in sorted(found)}


def check_all(texts: Mapping[str, str], known: Mapping[str, Any]) -> list[str]:
    """Where the pages and the JSON files differ, a sentence each. texts: by path; known: see `figures.records`."""
    sources, wrong = json.loads((RESULTS / "figures.json").read_text()), []
    have = set(intervals([*known.values()]))
    for page, text in texts.items():
        reports = {name for mark in MARK.findall(text) for name in reports_with(mark, known)}
        wrong += [f"{page}: {name}.json has other tables" for name in reports if filled_from(known[name], text) != text]
        wrong += [f"{page}: {one}" for one in check(text, sources.get(page, ()), known, complete=page in COMPLETE)]
        lost = (found[0] for found in INTERVAL.finditer(text) if found.groups() not in have)
        wrong += [f"{page}: no JSON file has {one}" for one in lost]
    return wrong


def reports_with(mark: str, known: Mapping[str, Any]) -> list[str]:
    """The JSON files that a marked table is of."""
    named = {"demo": "demo_cpu", "all": "smollm2_mixed"}.get(mark, f"paper_{mark}")
    found = [named] if named in known else [name for name, one in known.items() if mark in one.get("entries", {})]
    if not found:
        raise ValueError(f"{mark}: no JSON file has this table")
    return found


def verdicts_again(known: Mapping[str, Any]) -> list[str]:
    """The entries of papers whose figures, verdicts or intervals are not those of their counts."""
    wrong = []
    for name, label, entry in [(p["paper"], *e) for p in known.values() if "paper" in p for e in p["entries"].items()]:
        made = judge_entry(entry, read_kept(counts_file(RESULTS / "any.json", name, label)))
        if not alike(json.loads(json.dumps(made)), entry):
            wrong.append(f"paper_{name}.json: {label} is not what its counts say")
    return wrong


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
    what = "report.json of evaluate-checkpoint, a record, or a paper's results; without it, --check compares all"
    parser.add_argument("report", type=Path, nargs="?", help=what)
    parser.add_argument("pages", type=Path, nargs="*", help="Markdown files")
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    options = parser.parse_args(arguments)
    if options.report is None and options.check:
        known = records()
        sys.exit("\n".join(check_all(pages(), known) + verdicts_again(known)) or None)
    if not options.pages:
        parser.error("expected a report and pages, or --check alone")
    content, differ = json.loads(options.report.read_text()), []
    for page in options.pages:
        old = page.read_text()
        new = filled_from(content, old)
        if new != old:
            differ.append(str(page))
            if not options.check:
                page.write_text(new)
    if options.check and differ:
        sys.exit(f"{', '.join(differ)}: other figures than {options.report}")


if __name__ == "__main__":
    with crashing():  # status 1 says what was found
        main(sys.argv[1:])
