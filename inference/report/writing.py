"""Writing a report: as files, on the console, and in Weights & Biases."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from outrider.base.errors import reason, warn
from outrider.base.files import require_writable, write_atomically, write_json
from outrider.base.streams import Streams
from outrider.base.wandb_config import ID_FILE, WandbConfig
from outrider.base.words import format_figure
from outrider.inference.measure.results import REPORT_FILE, PromptResult
from outrider.inference.measure.speed import conversations, speedup, tokens_per_second
from outrider.inference.measure.statistics import loop_length
from outrider.inference.report import sentences
from outrider.inference.report.plots import save_plots
from outrider.inference.report.served import served_lines
from outrider.inference.report.tables import identical_text, judged_table, methods_tables
from outrider.inference.report.types import MethodReport, to_json
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import AUTOREGRESSIVE

# Of the table in Weights & Biases: `headline_figures`. "identical": texts that equal the reference's.
COLUMNS = ("method", "prompts", "identical", "tau", "tokens_per_second", "speedup", "speedup_low", "speedup_high")


def write_markdown(reports: Sequence[MethodReport]) -> str:
    """report.md: the tables of the methods, and sentences on each method."""
    conditions, judgement_table = reports[0].conditions, judged_table(reports)
    findings = [*sentences.doctor_lines(conditions)]  # of an examination of the drafters
    lines = [
        f"# {conditions.drafter} on {conditions.model}",
        *(f"**{warning}**" for warning in conditions.load.warnings(conditions.device)),
        f"**Verdict:** {sentences.write_recommendation(reports)}",
        sentences.conditions_text(reports),
        *("\n".join(table.markdown()) for table in methods_tables(reports)),
        "\n".join(sentences.write_sentences(reports)),
    ]
    if judgement_table.rows:
        heading = "Judged by rounding errors over the reference's text, in units of transformers' own:"
        lines += [heading, "\n".join(judgement_table.markdown()), sentences.describe_resolution(conditions)]
    lines += ["\n".join(block) for block in (served_lines(reports), findings and ["```", *findings, "```"]) if block]
    return "\n\n".join(lines) + "\n"


def write_reports(
    out_dir: Path,
    reports: Sequence[MethodReport],
    results: Sequence[PromptResult],
    texts: Mapping[tuple[str, str], str],
    make_page: Callable[[Mapping[str, str]], str],
) -> None:
    """Write report.json, report.md, report.html, the plots and generations.jsonl to `out_dir`, each atomically.

    report.json is the report itself for one method, {"reports": [...]} for several. texts: the decoded continuation by
    (prompt id, arm), a method or a baseline. make_page: makes report.html from the plots, SVG by what they show.
    """
    require_writable(out_dir)
    json_lines = [
        json.dumps(
            {"id": r.prompt_id, "category": r.category, "arm": arm, "tokens": list(g.tokens),
             "text": texts[r.prompt_id, arm], "prefill_seconds": g.prefill_seconds, "decode_seconds": g.decode_seconds,
             "accepted": [round_.accepted for round_ in g.rounds], "drafted": [round_.drafted for round_ in g.rounds],
             "depth": [round_.depth for round_ in g.rounds]}
        )
        for r in results
        for arm, g in r.generations.items()
    ]  # fmt: skip
    json_reports = [*map(to_json, reports)]
    (out_dir / REPORT_FILE).unlink(missing_ok=True)  # written last, so it never accompanies another run's files
    write_atomically(out_dir / "generations.jsonl", ("\n".join(json_lines) + "\n").encode())
    write_atomically(out_dir / "report.html", make_page(save_plots(out_dir, reports)).encode())
    write_atomically(out_dir / "report.md", write_markdown(reports).encode())
    write_json(out_dir / REPORT_FILE, json_reports[0] if len(json_reports) == 1 else {"reports": json_reports})


def log_reports(
    config: WandbConfig, out_dir: Path, reports: Sequence[MethodReport], settings: Mapping[str, object]
) -> None:
    """Log the evaluation in `out_dir`, after its report is written, as one run. A resumed evaluation continues its run.

    settings: JSON-able, shown as the run's config. Nothing is logged if Weights & Biases (W&B) is disabled.
    """
    if not config.is_on():
        return
    import wandb

    init_options = {**config.init_options(out_dir), "job_type": "evaluate", "config": dict(settings)}
    try:
        run = wandb.init(project=config.project, **init_options)
    except wandb.Error as error:  # the report is written
        warn(f"wandb.mode: {reason(error)}; wandb login, or wandb.mode=offline, and resume=true logs the report")
        return
    (out_dir / ID_FILE).write_text(run.id, "utf-8")
    headlines = [headline_figures(report) for report in reports]
    for figures in headlines:
        run.summary.update({f"{figures['method']}/{key}": value for key, value in figures.items() if key != "method"})
    table = wandb.Table(columns=list(COLUMNS), data=[[*figures.values()] for figures in headlines])
    page = wandb.Html((out_dir / "report.html").read_text(encoding="utf-8"), inject=False)  # no styles of wandb's
    run.log({"methods": table, "report": page})
    run.finish()


def result_lines(results: Sequence[PromptResult], config: EvaluateConfig) -> list[str]:
    """A line for plain decoding and every method: the figures of what is measured so far."""
    lines, streams = [], Streams(config.seed).within("so far")
    for arm in (AUTOREGRESSIVE, *config.methods):
        speed, ratio = tokens_per_second(results, arm), speedup(results, arm, AUTOREGRESSIVE, streams)
        same = "sampled" if config.sampling.temperature else sum(r.identical(arm, AUTOREGRESSIVE) for r in results)
        factor = format_figure(ratio, "interval" if ratio.prompts > 1 else "times")  # one prompt has no interval
        figures = f"tokens_per_second={format_figure(speed, '.1f')} speedup='{factor}' same_text={same}/{len(results)}"
        figures += f" looping={sum(loop_length(r.generations[arm].tokens) > 0 for r in results)}/{len(results)}"
        lines.append(f"result method={arm} prompts={conversations(results)} {figures}")
    return lines


def headline_figures(report: MethodReport) -> dict[str, object]:
    """The figures of one method for W&B, by `COLUMNS`."""
    gain, same_cell = report.figures.speedup, identical_text(report, report.lossless.identical)
    first_cells = (report.method, report.figures.prompts, same_cell, report.figures.tau)
    speed = report.tokens_per_second["speculative"]
    return dict(zip(COLUMNS, (*first_cells, speed, gain.median, *(gain.ci95 or (None, None))), strict=True))
