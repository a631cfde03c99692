"""The speed-up of every method of a report as one picture: medians with their 95 % intervals, the fastest on top.

    python benchmarks/plot_report.py runs/demo/report/report.json speedups.png

Reads the report.json of evaluate-checkpoint and writes a PNG.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.inference.report.plots import plot_speedups

Report = Mapping[str, Any]


def read_reports(path: Path) -> list[Report]:
    """The timed reports of a report.json, the fastest first. Raises `ValueError` where there is none to draw."""
    content = json.loads(path.read_text())
    reports = content.get("reports", [content])
    timed = [report for report in reports if report.get("speedup", {}).get("median") is not None]
    if not timed:
        raise ValueError(f"{path}: no method with a measured speed-up")
    return sorted(timed, key=lambda report: -report["speedup"]["median"])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.json of evaluate-checkpoint")
    parser.add_argument("out", type=Path, help="the PNG to write")
    options = parser.parse_args(arguments)
    plot_speedups(read_reports(options.report)).savefig(options.out, format="png", dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
