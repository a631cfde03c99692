"""The speed-up of every method of a report as one picture: medians with their 95 % intervals.

    python benchmarks/plot_report.py runs/demo/report/report.json speedups.png

Reads the report.json of evaluate-checkpoint and writes a PNG. The fastest method stands on top. Colour and marker
both say what drafts, so the picture reads without colours too. A hollow marker: not lossless, so not faster.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Report = Mapping[str, Any]
# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
SOURCES = {
    "early_exit": ("early exit", "#0072B2", "o"),
    "small_lm": ("small LM", "#D55E00", "s"),
    "skip_layers": ("the target, layers skipped", "#E69F00", "P"),
    "ngrams": ("n-grams", "#009E73", "^"),
    "prompt_lookup": ("prompt lookup", "#CC79A7", "D"),
}
OTHER = ("#000000", "v")  # of a source that is not listed
WIDTH, ROW, MARGIN, DPI = 8.0, 0.34, 1.3, 150  # inches, inches per method, inches for axis and title


def read_reports(path: Path) -> list[Report]:
    """The reports of a report.json, of one method or of several. Raises `ValueError` where there is none to draw."""
    content = json.loads(path.read_text())
    reports = content.get("reports", [content])
    timed = [report for report in reports if report.get("speedup", {}).get("median") is not None]
    if not timed:
        raise ValueError(f"{path}: no method with a measured speed-up")
    return timed


def plot(reports: Sequence[Report]) -> Figure:
    """One line a method: the median speed-up over autoregressive decoding and its interval, the fastest on top."""
    ordered = sorted(reports, key=lambda report: report["speedup"]["median"])
    figure = Figure(figsize=(WIDTH, MARGIN + ROW * len(ordered)), layout="constrained")
    axes = figure.subplots()
    named = set()
    for place, report in enumerate(ordered):
        median, (low, high) = report["speedup"]["median"], report["speedup"]["ci95"]
        source = report["settings"]["source"]
        label, colour, marker = SOURCES.get(source, (source, *OTHER))
        lossless = report.get("verdict") != "not lossless"
        axes.errorbar(
            median, place, xerr=[[median - low], [high - median]], fmt=marker, color=colour, markersize=8, capsize=4,
            linewidth=2, markerfacecolor=colour if lossless else "white", label=None if label in named else label,
        )  # fmt: skip
        axes.annotate(
            f"{median:.2f}×" if lossless else f"{median:.2f}×, not lossless",
            (median, place), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9,
        )  # fmt: skip
        named.add(label)
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(ordered)), [report["method"] for report in ordered], fontsize=11)
    axes.set(xlim=(0, None), ylim=(-0.6, len(ordered) - 0.2))
    axes.set_xlabel("speed-up over autoregressive decoding: median and 95 % interval", fontsize=11)
    axes.set_title(conditions(reports[0]), fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", fontsize=10)
    return figure


def conditions(report: Report) -> str:
    """What was measured, in one line."""
    machine = report["machine"]
    chosen = f"temperature {report['temperature']:g}" if report["temperature"] else "greedy"
    return (
        f"{report['prompts']} prompts × {report['max_new_tokens']} tokens, {chosen}, {report['dtype']}, "
        f"{machine['device']}, {machine['threads']} threads"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="report.json of evaluate-checkpoint")
    parser.add_argument("out", type=Path, help="the PNG to write")
    options = parser.parse_args(arguments)
    plot(read_reports(options.report)).savefig(options.out, format="png", dpi=DPI)


if __name__ == "__main__":
    main(sys.argv[1:])
