"""One run of a W&B sweep over evaluate-checkpoint: measures, and logs the report's figures to the run.

python slurm/sweep_evaluate.py checkpoint=runs/eesd method=eesd_beta OVERRIDES…       (see conf/sweep/decoding.yaml)
"""

import os
import subprocess
import sys
from pathlib import Path

import wandb

from outrider.inference.report.types import MethodReport, read_reports


def main() -> None:
    out_dir = Path("runs/sweep") / os.environ.get("WANDB_RUN_ID", f"pid-{os.getpid()}")
    measured = subprocess.run(["evaluate-checkpoint", *sys.argv[1:], "resume=true", f"out_dir={out_dir}"], check=False)
    if measured.returncode:
        sys.exit(measured.returncode)  # also for a method that is not lossless: its speed-up means nothing
    (report,) = read_reports(out_dir / "report.json", "give one method")
    with wandb.init(dir=str(out_dir)) as run:
        run.log(numbers(report) | pages(report, out_dir))


def pages(report: MethodReport, out_dir: Path) -> dict[str, object]:
    """The report's page, and its categories as a table, for readers."""
    columns = ("tau", "acceptance_rate", "drafted_tokens_per_round")
    rows = [
        [name, figures.prompts, *(getattr(figures, column) for column in columns), figures.speedup.median]
        for name, figures in report.by_category.items()
    ]
    table = wandb.Table(columns=["category", "prompts", *columns, "speedup"], data=rows)
    return {"report": wandb.Html((out_dir / "report.html").read_text(), inject=False), "by_category": table}


def numbers(report: MethodReport) -> dict[str, float | None]:
    """The figures that a sweep may optimise, from the report of one method."""
    return {
        "speedup": report.figures.speedup.median,
        "tau": report.figures.tau,
        "acceptance_rate": report.figures.acceptance_rate,
        "tokens_per_second": report.tokens_per_second["speculative"],
    }


if __name__ == "__main__":
    main()
