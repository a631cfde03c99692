"""The plots of a report, as PNG files and as SVG in report.html."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outrider.base.files import write_atomically
from outrider.inference.report.types import NOT_LOSSLESS, TARGET_DIFFERS, MethodReport

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B5578F", "#E69F00", "#3D9BD3", "#8A6D00", "#7A7A7A")
MARKERS = "os^Dv"  # methods are told apart by their shapes, too; 8 colours and 5 shapes recur
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # None leaves a key out of the SVG
SPEEDUPS = "Speed-up over plain decoding (dashed: 1×): a dot for each prompt; below, the median and its 95 % interval"
ACCEPTANCE = "Share of drafts accepted so deep, of those that reached this depth; small marks: few of them"


def save_plots(folder: Path, reports: Sequence[MethodReport]) -> dict[str, str]:
    """Write the plots to `folder`; returns them as SVG for a page of HTML, by what they show."""
    return {
        SPEEDUPS: _save(plot_speedups(reports), folder / "speedup_per_prompt.png"),
        ACCEPTANCE: _save(plot_acceptance(reports), folder / "acceptance_by_position.png"),
    }


def _save(plot: Figure, path: Path) -> str:
    png_buffer, svg_buffer = io.BytesIO(), io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "outrider"}):
        plot.savefig(png_buffer, format="png", dpi=160)
        plot.savefig(svg_buffer, format="svg", transparent=True, metadata=NO_METADATA)
    write_atomically(path, png_buffer.getvalue())
    svg = "<svg" + svg_buffer.getvalue().partition("<svg")[2]  # without the header of an XML file
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)  # HTML needs no namespaces


def plot_speedups(reports: Sequence[MethodReport]) -> Figure:
    """One row per method: its name and speed-up, a dot for every prompt, and the median with its interval below.

    An interval that is wider by far is cut, which an arrow shows.
    """
    plot = Figure(figsize=(4.8, 0.8 + 0.6 * len(reports)), layout="constrained")
    axes = plot.subplots()
    medians = [report.figures.speedup.median or 0 for report in reports]
    intervals = [report.figures.speedup.shown_interval for report in reports]  # None: too few prompts
    max_bound = max((interval[1] for interval in intervals if interval), default=0)
    axis_end = max(1.2, min(max_bound, 2.5 * max(medians)))  # a wider interval is cut there
    for row, report in enumerate(reports):
        speedups, speedup, colour = [*report.speedup_per_prompt.values()], report.figures.speedup, COLOURS[row % 8]
        wrong_note = ", not lossless" if report.verdict in (NOT_LOSSLESS, TARGET_DIFFERS) else ""
        axes.text(0, row - 0.2, f"{report.method}: {speedup:interval}{wrong_note}", parse_math=False)
        axes.plot([1, 1], [row - 0.1, row + 0.45], "--", color="black", linewidth=1)
        axes.plot(speedups, [row] * len(speedups), "o", markersize=5, color=colour, alpha=0.5, markeredgewidth=0)
        if speedup.median is not None:
            axes.plot(speedup.median, row + 0.25, MARKERS[row % 5], markersize=8, color=colour)
        if speedup.shown_interval is not None:
            axes.plot(speedup.shown_interval, [row + 0.25] * 2, color=colour, linewidth=3)
            if speedup.shown_interval[1] > axis_end:
                axes.plot(axis_end, row + 0.25, ">", markersize=8, color=colour)
    limits = {"xlim": (0, 1.05 * axis_end), "ylim": (len(reports) - 0.5, -0.7)}  # row 0 is on top
    axes.set(xlabel="times as fast as plain decoding", yticks=[], **limits)
    return plot


def plot_acceptance(reports: Sequence[MethodReport]) -> Figure:
    """Share of rounds accepted to depth i, among rounds that drafted that deep; marker area ∝ rounds."""
    plot = Figure(figsize=(4.8, 3.6 + 0.1 * len(reports)), layout="constrained")
    axes = plot.subplots()
    for number, report in enumerate(reports):
        depth_rows = report.acceptance_by_position
        if not depth_rows:
            continue
        positions, shares = [row.position for row in depth_rows], [row.accepted for row in depth_rows]
        areas, colour = [90 * row.rounds / depth_rows[0].rounds for row in depth_rows], COLOURS[number % 8]
        axes.plot(positions, shares, color=colour, linewidth=1)
        axes.scatter(
            positions, shares, s=areas, color=colour, marker=MARKERS[number % 5], label=report.method, clip_on=False
        )
    axes.set(xlabel="depth in the draft", ylabel="accepted, of rounds that drafted so deep", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:  # no legend if nothing was drafted
        plot.legend(loc="outside lower left", ncols=2, frameon=False)
    return plot
