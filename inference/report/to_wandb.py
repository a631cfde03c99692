"""A report in Weights & Biases: the table of methods, their figures as summary, and report.html."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inference.report.wording import Report, identical_text
from outrider.wandb_config import ID_FILE, WandbConfig

COLUMNS = ("method", "prompts", "identical", "tau", "tokens_per_second", "speedup", "speedup_low", "speedup_high")


def log_reports(config: WandbConfig, out_dir: Path, reports: Sequence[Report], settings: Mapping[str, Any]) -> None:
    """Log the evaluation in `out_dir`, after its report is written, as one run. A resumed evaluation continues its run.

    settings: JSON-able, shown as the run's config. Does nothing if W&B is disabled.
    """
    if not config.is_on():
        return
    import wandb

    options = {**config.init_options(out_dir), "job_type": "evaluate", "config": dict(settings)}
    run = wandb.init(project=config.project, **options)
    (out_dir / ID_FILE).write_text(run.id, "utf-8")
    rows = [row(report) for report in reports]
    for figures in rows:
        name = figures["method"]
        run.summary.update({f"{name}/{key}": value for key, value in figures.items() if key != "method"})
    table = wandb.Table(columns=list(COLUMNS), data=[[figures[key] for key in COLUMNS] for figures in rows])
    page = wandb.Html((out_dir / "report.html").read_text(encoding="utf-8"), inject=False)
    run.log({"methods": table, "report": page})
    run.finish()


def row(report: Report) -> dict[str, Any]:
    """The figures of one method."""
    low, high = report["speedup"]["ci95"] or (None, None)
    figures = {
        "method": report["method"],
        "prompts": report["prompts"],
        "identical": identical_text(report, "identical"),
        "tau": report["tau"],
        "tokens_per_second": report["tokens_per_second"]["speculative"],
        "speedup": report["speedup"]["median"],
        "speedup_low": low,
        "speedup_high": high,
    }
    return {key: figures[key] for key in COLUMNS}
