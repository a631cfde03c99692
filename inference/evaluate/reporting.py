"""The phases of an evaluation after the measurement: judge the stored results, and write the report.

A method is a drafter and how it drafts. It is judged lossless if its texts are the target's.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from outrider.base.processes import from_main
from outrider.base.progress import Stage
from outrider.draft_models.card import add_report
from outrider.inference.evaluate.planning import EvaluationPlan
from outrider.inference.measure.prepared import Prepared
from outrider.inference.measure.results import PromptResult, finished_results
from outrider.inference.report.building import build_report
from outrider.inference.report.conditions import describe_conditions
from outrider.inference.report.page import make_page
from outrider.inference.report.sentences import OWN_RUN, write_repeat_command
from outrider.inference.report.types import NOT_LOSSLESS, TARGET_DIFFERS, MethodReport, ServedJudgement, ServedRow
from outrider.inference.report.writing import log_reports, result_lines, write_markdown, write_reports
from outrider.inference.settings.kinds import KINDS


@dataclass(frozen=True)
class EnginePart:
    """What a serving engine adds to the report of a method: rows by concurrency, and by arm the audit of texts."""

    served: tuple[ServedRow, ...]
    served_judgement: Mapping[str, ServedJudgement] | None = None


def judge_results(
    plan: EvaluationPlan, prepared: Prepared, engine_parts: Mapping[str, EnginePart]
) -> tuple[list[MethodReport], list[PromptResult]]:
    """The reports of all methods, and the results of all turns in `plan.out_dir`. engine_parts: by method."""
    config = plan.config
    measured = finished_results(plan.out_dir, config.batch)
    results = [result for prompt in measured for result in prompt.turns]
    conditions = describe_conditions(config, plan.setup, prepared, plan.prompts, measured, plan.identity)
    reports = [
        build_report(name, method, results, conditions, config.seed, prepared.tunings.get(name))
        for name, method in prepared.methods.items()
    ]
    part_fields = {name: vars(part) for name, part in engine_parts.items()}
    return [replace(report, **part_fields.get(report.method, {})) for report in reports], results


def write_pages(
    plan: EvaluationPlan, reports: Sequence[MethodReport], results: Sequence[PromptResult], command_words: Sequence[str]
) -> None:
    """Write the report to `plan.out_dir`, to the console, to the drafters' cards, and to Weights & Biases."""
    config, tokenizer = plan.config, plan.setup.tokenizer
    decoded_texts = {
        (r.prompt_id, arm): str(tokenizer.decode(list(g.tokens), skip_special_tokens=True))
        for r in results
        for arm, g in r.generations.items()
    }
    build_page = partial(make_page, reports, results, lambda ids: str(tokenizer.decode(list(ids))))
    write_reports(plan.out_dir, reports, results, decoded_texts, build_page)
    print("\n".join([*result_lines(results, config), "", write_markdown(reports)]))
    for kind_name, drafter_path in config.paths.items() if config.card else ():  # card: README.md of a drafter
        if config.plugin(KINDS[kind_name]).has_card and Path(drafter_path).is_dir():
            add_report(Path(drafter_path), write_markdown(reports))
    log_reports(config.wandb, plan.out_dir, reports, plan.identity)
    conditions = reports[0].conditions  # origin: a sentence on what the prompts are to the drafters, or ""
    if conditions.load.busy:  # other programs ran meanwhile: the timings should be repeated
        print(write_repeat_command(sys.argv[1:], plan.out_dir, command_words), flush=True)
    print("\n".join([*filter(None, [conditions.origin]), f"report: {plan.out_dir / 'report.html'}"]), flush=True)


def wrong_methods(reports: Sequence[MethodReport]) -> list[str]:
    """The methods that were not lossless. If plain decoding was not, `OWN_RUN` stands for all of them."""
    if reports[0].verdict == TARGET_DIFFERS:  # this verdict, on plain decoding, is in every report
        return [OWN_RUN]
    return [report.method for report in reports if report.verdict == NOT_LOSSLESS or report.served_faults]


def write_report(
    plan: EvaluationPlan,
    prepared: Prepared,
    engine_parts: Mapping[str, EnginePart] = MappingProxyType({}),
    command_words: Sequence[str] = ("evaluate-checkpoint",),
) -> list[str]:
    """Judge and write, on the main process; returns the methods that were not lossless (see `wrong_methods`).

    command_words: the words that run this command again.
    """

    def judge_and_write() -> list[str]:
        reports, results = judge_results(plan, prepared, engine_parts)
        write_pages(plan, reports, results, command_words)
        return wrong_methods(reports)

    with Stage("writing the report"):
        return from_main(plan.processes, judge_and_write)
