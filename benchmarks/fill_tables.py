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
end". The verdicts on a paper's claims (paper.py) are between "gsd tables: begin" and "gsd tables: end",
likewise for each paper. --check writes nothing, and ends with status 1 if a page differs from the report.
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.writing import markdown, measured
from record_tables import by_dtype, layouts, summary, tables

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
    shapes = {"table": tables, "summary": summary, "layouts": layouts, "dtypes": by_dtype}
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


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.json of evaluate-checkpoint, a record, or a paper's results")
    parser.add_argument("pages", type=Path, nargs="+", help="Markdown files")
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    options = parser.parse_args(arguments)
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
