"""The report: numbers from measured generations, as JSON and Markdown, and in Weights & Biases."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.base.files import require_writable, write_atomically, write_json
from outrider.base.machine import describe_machine
from outrider.base.streams import Streams
from outrider.base.wandb_config import ID_FILE, WandbConfig
from outrider.base.words import figure
from outrider.draft_models.early_exit.checkpoint import provenance
from outrider.inference.measure.lossless import judge
from outrider.inference.measure.results import REPORT_FILE, Measured, PromptResult
from outrider.inference.measure.speed import (
    break_even,
    conversations,
    end_to_end,
    parts_of_time,
    prefill_seconds,
    speedup,
    speedups,
    speedups_over_baselines,
    time_of_a_plain_token,
    tokens_per_second,
    without_loops,
)
from outrider.inference.measure.statistics import (
    acceptance_by_candidates,
    acceptance_by_position,
    chosen_sizes,
    decode_statistics,
    looped,
    share_of_loops,
    structure_statistics,
    verdict,
)
from outrider.inference.report import wording
from outrider.inference.report.facts import doctor_lines
from outrider.inference.report.plots import save_plots
from outrider.inference.report.served import served_lines
from outrider.inference.report.tables import identical_text, judged_table, methods_tables
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import AUTOREGRESSIVE, TRANSFORMERS
from outrider.inference.sizing.policy import Tuning

Report = dict[str, Any]
EXACT = ("float32", "float64")  # dtypes in which texts must be equal, and no difference is a rounding tie
COLUMNS = ("method", "prompts", "identical", "tau", "tokens_per_second", "speedup", "speedup_low", "speedup_high")


def build_report(
    method: str, results: Sequence[PromptResult], facts: Mapping[str, Any], seed: int, tuning: Tuning | None = None
) -> Report:
    """The report of one method over all prompts; `facts` (target, temperature, settings, …) are added unchanged.

    tuning: the measurements that "auto" sizes were chosen from.
    """
    generations = [r.generations[method] for r in results]
    arms = {"autoregressive": AUTOREGRESSIVE, TRANSFORMERS: TRANSFORMERS, "speculative": method}
    streams = Streams(seed).within(method, "bootstrap")
    report: Report = {
        "method": method,
        **facts,
        "machine": describe_machine(facts["device"]),
        "made_with": provenance(),
        **_figures(results, method, streams),
        "tokens": sum(len(g.tokens) for g in generations),
        "seed": seed,
        "lossless": lossless_section(
            results, method, sampled=facts["temperature"] > 0, exact=facts.get("computes_in") in EXACT
        ),
        "structure": structure_statistics(generations),
        "acceptance_by_candidates": acceptance_by_candidates(generations),
        "auto": tuning and {"costs": tuning.costs.summary(), "chosen": chosen_sizes(generations)},
        "tokens_per_second": {name: tokens_per_second(results, arm) for name, arm in arms.items()},
        "whole_answers_per_second": {name: tokens_per_second(results, arm, prefill=True) for name, arm in arms.items()},
        "prefill_seconds": {name: prefill_seconds(results, arm, streams) for name, arm in arms.items()},
        "speedup": speedups_over_baselines(results, method, streams),
        "end_to_end": speedups_over_baselines(results, method, streams, end_to_end),
        "autoregressive": time_of_a_plain_token(results),
        "break_even_acceptance": break_even(results, method),
        "seconds": parts_of_time(results, method),
        "acceptance_by_position": acceptance_by_position(generations),
        "acceptance_given_previous": acceptance_by_position(generations, given_previous=True),
        "by_category": {},
    }
    if TRANSFORMERS in results[0].generations:
        report[TRANSFORMERS] = {
            "speedup": speedup(results, TRANSFORMERS, AUTOREGRESSIVE, streams),
            "end_to_end": speedup(results, TRANSFORMERS, AUTOREGRESSIVE, streams, end_to_end),
        }
    for category in sorted({r.category for r in results}):
        members = [r for r in results if r.category == category]
        report["by_category"][category] = _figures(members, method, streams.within("category", category))
    report["speedup_per_prompt"] = speedups(results, method, AUTOREGRESSIVE)
    report["verdict"] = _verdict(report)
    return report


def _figures(results: Sequence[PromptResult], method: str, streams: Streams) -> Report:
    """The figures of a method on some prompts, its share of looping text, and the speed-up without loops."""
    generations, loopless = [r.generations[method] for r in results], without_loops(results, method, AUTOREGRESSIVE)
    return {
        "prompts": conversations(results),
        "turns": len(results),
        **decode_statistics(generations),
        "speedup": speedup(results, method, AUTOREGRESSIVE, streams),
        "loops": share_of_loops([g.tokens for g in generations]),
        "speedup_without_loops": speedup(loopless, method, AUTOREGRESSIVE, streams),
    }


def lossless_section(results: Sequence[PromptResult], method: str, *, sampled: bool, exact: bool = False) -> Report:
    """The number of texts compared token by token, and the judgements of the method and of plain decoding.

    Sampled texts are not compared, as only their distribution is the same. exact: no difference is excused as a tie.
    judged: by arm, see `lossless`; None if only equal texts counted.
    """
    checked = [] if sampled else results
    arms = (method, AUTOREGRESSIVE)
    deviations = {arm: [r.deviations[arm] for r in results if arm in r.deviations] for arm in arms}
    judgements = {arm: judge(rows) if rows else None for arm, rows in deviations.items()}

    def ties(arm: str) -> int:
        judgement = judgements[arm]
        judged_right = judgement is not None and not judgement.faults and not exact
        return sum(not r.identical(arm) and arm in r.deviations for r in checked) if judged_right else 0

    return {
        "reference": None if sampled else results[0].reference,
        "checked": len(checked),
        "identical": sum(r.identical(method) for r in checked),
        "identical_to_plain": sum(r.identical(method, AUTOREGRESSIVE) for r in checked),
        "excused_ties": ties(method),
        "autoregressive_identical": sum(r.identical(AUTOREGRESSIVE) for r in checked),
        "autoregressive_excused_ties": ties(AUTOREGRESSIVE),
        "judged": {arm: judgement and asdict(judgement) for arm, judgement in judgements.items()},
    }


def markdown(reports: Sequence[Report]) -> str:
    """report.md: the tables of the methods, and sentences on each method."""
    first, judged, doctor = reports[0], judged_table(reports), doctor_lines(reports[0])
    lines = [
        f"# {first['drafter']} on {first['model']}",
        *(f"**{busy}**" for busy in wording.busy_sentences(first)),
        f"**Verdict:** {wording.recommendation(reports)}",
        wording.conditions(reports),
        *("\n".join(table.markdown()) for table in methods_tables(reports)),
        "\n".join(wording.sentences(reports)),
    ]
    if judged.rows:
        heading = "Judged by rounding errors over the reference's text, in units of transformers' own:"
        lines += [heading, "\n".join(judged.markdown()), wording.resolution(first)]
    lines += ["\n".join(part) for part in (served_lines(reports), doctor and ["```", *doctor, "```"]) if part]
    return "\n\n".join(lines) + "\n"


def write_reports(
    out_dir: Path,
    reports: Sequence[Report],
    results: Sequence[PromptResult],
    texts: Mapping,
    page: Callable[[Mapping[str, str]], str],
) -> None:
    """Write report.json, report.md, report.html, the plots and generations.jsonl to `out_dir`, each atomically.

    report.json is the report itself for one method, {"reports": [...]} for several. `texts` maps (prompt id,
    arm) to the decoded continuation. page: makes report.html of the plots (see `inference.report.page`).
    """
    require_writable(out_dir)
    generations = [
        json.dumps(
            {"id": r.prompt_id, "category": r.category, "arm": arm, "tokens": list(g.tokens),
             "text": texts[r.prompt_id, arm], "prefill_seconds": g.prefill_seconds, "decode_seconds": g.decode_seconds,
             "accepted": [round_.accepted for round_ in g.rounds], "drafted": [round_.drafted for round_ in g.rounds],
             "depth": [round_.depth for round_ in g.rounds]}
        )
        for r in results
        for arm, g in r.generations.items()
    ]  # fmt: skip
    content = reports[0] if len(reports) == 1 else {"reports": list(reports)}
    (out_dir / REPORT_FILE).unlink(missing_ok=True)  # written last, so it never accompanies another run's files
    write_atomically(out_dir / "generations.jsonl", ("\n".join(generations) + "\n").encode())
    write_atomically(out_dir / "report.html", page(save_plots(out_dir, reports)).encode())
    write_atomically(out_dir / "report.md", markdown(reports).encode())
    write_json(out_dir / REPORT_FILE, content)


def _verdict(report: Report) -> str:
    if wording.target_differs(report):
        return "target differs"
    if not wording.is_lossless(report):
        return "not lossless"
    return verdict(report["speedup_without_loops"], (report.get("load") or {}).get("busy"))


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
        run.summary.update({f"{figures['method']}/{key}": value for key, value in figures.items() if key != "method"})
    table = wandb.Table(columns=list(COLUMNS), data=[[*figures.values()] for figures in rows])
    page = wandb.Html((out_dir / "report.html").read_text(encoding="utf-8"), inject=False)
    run.log({"methods": table, "report": page})
    run.finish()


def result_lines(measured: Mapping[int, Measured], config: EvaluateConfig) -> list[str]:
    """A line for plain decoding and every method: the figures of what is measured so far, by position."""
    results = [result for _, prompt in sorted(measured.items()) for result in prompt.turns]
    lines, streams = [], Streams(config.seed).within("so far")
    for arm in (AUTOREGRESSIVE, *config.methods):
        speed, gain = tokens_per_second(results, arm), speedup(results, arm, AUTOREGRESSIVE, streams)
        same = "sampled" if config.sampling.temperature else sum(r.identical(arm, AUTOREGRESSIVE) for r in results)
        times = figure(gain, "interval" if gain["prompts"] > 1 else "times")  # one prompt has no interval
        figures = f"tokens_per_second={figure(speed, '.1f')} speedup='{times}' same_text={same}/{len(results)}"
        figures += f" looping={sum(looped(r.generations[arm].tokens) > 0 for r in results)}/{len(results)}"
        lines.append(f"result method={arm} prompts={conversations(results)} {figures}")
    return lines


def row(report: Report) -> dict[str, Any]:
    """The figures of one method, by `COLUMNS`."""
    speed, gain = report["tokens_per_second"]["speculative"], report["speedup"]
    counted = (report["method"], report["prompts"], identical_text(report, ties=""), report["tau"])
    return dict(zip(COLUMNS, (*counted, speed, gain["median"], *(gain["ci95"] or (None, None))), strict=True))
