"""Whole evaluations of tiny models: by one process, by several, or killed on the way."""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from accelerate import PartialState

from outrider.base.errors import UserError
from outrider.data_prep.text.prompts import Prompt
from outrider.inference.core.rounds import Generation
from outrider.inference.evaluate import evaluation, measuring
from outrider.inference.evaluate.engine import evaluate_in_engine
from outrider.inference.measure.results import append_result, read_results
from outrider.inference.report import plots
from outrider.inference.settings.engine import EngineConfig
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig, StructureConfig
from tests.launched import launched

QUESTIONS = [
    Prompt("a", "code", ("def add(first, second):",), False),
    Prompt("b", "chat", ("question one?", "and then?"), True),
    Prompt("c", "code", ("class Round:",), False),
    Prompt("d", "chat", ("question two?", "why?"), True),
    Prompt("e", "text", ("once upon a time",), False),
]


METHODS = {
    "chain": MethodConfig(stop=StopConfig(rule="fixed", max_draft=3)),
    "tree": MethodConfig(structure=StructureConfig(kind="opt_tree", nodes=6)),  # its delta is measured
}


def evaluate(config: EvaluateConfig, prompts: Sequence[Prompt] = QUESTIONS) -> None:
    """All of an evaluation but its plots, which take longer to draw than these models to decode.

    Most of these models have no chat template: what a config leaves open is bare text.
    """
    config = replace(config, template="none") if config.template == "auto" else config
    with patch.object(plots, "_save", return_value=""):
        if isinstance(config, EngineConfig):
            evaluate_in_engine(config, prompts)
        else:
            evaluation.evaluate_checkpoint(config, prompts)


def in_engine(config: EvaluateConfig, **options: Any) -> EngineConfig:
    """The same evaluation, measured in an engine too."""
    return EngineConfig(**{field.name: getattr(config, field.name) for field in fields(config)} | options)


def tokens(config: EvaluateConfig) -> dict[tuple[str, str], list[int]]:
    """What every arm said to every turn, in the order of the file."""
    lines = (Path(config.out_dir) / "generations.jsonl").read_text().splitlines()
    return {(line["id"], line["arm"]): line["tokens"] for line in map(json.loads, lines)}


def facts(config: EvaluateConfig) -> list[dict[str, object]]:
    """What the reports say that is no time."""
    path = Path(config.out_dir) / "report.json"
    reports = json.loads(path.read_text())["reports"]
    kept = ("method", "lossless", "prompts", "turns", "skipped", "tokens", "tau", "acceptance_rate",
            "acceptance_by_position")  # fmt: skip
    return [{key: report[key] for key in kept if report["method"] == "chain" or key in kept[:6]} for report in reports]


def measured(config: EvaluateConfig) -> dict[str, Mapping[str, Generation]]:
    """By the ids of a first turn as JSON: what every arm said."""
    results = [one.turns[0] for one in read_results(Path(config.out_dir)).values()]
    return {json.dumps([*result.prompt]): result.generations for result in results}


def processes(config: EvaluateConfig) -> int:
    return json.loads((Path(config.out_dir) / "report.json").read_text())["reports"][0]["processes"]


def refused(config: EvaluateConfig, why: str, prompts: Sequence[Prompt] = QUESTIONS) -> None:
    """The evaluation ends for that reason, before any weights are read."""
    with patch.object(measuring, "load_models", None), pytest.raises(UserError, match=why):
        evaluate(config, prompts)


def killed_after(config: EvaluateConfig, prompts: int, asked: Sequence[Prompt] = QUESTIONS) -> None:
    """`evaluate`, whose process is killed as by SIGKILL when that many prompts are done: nothing is cleaned up."""

    def run() -> None:
        def append(*arguments: object) -> None:
            append_result(*arguments)  # type: ignore[arg-type]
            if len(read_results(Path(config.out_dir))) == prompts:
                os.kill(os.getpid(), signal.SIGKILL)

        measuring.append_result = append  # in a fork
        evaluate(config, asked)

    job = multiprocessing.get_context("fork").Process(target=run)
    job.start()
    job.join(timeout=120)
    assert job.exitcode == -signal.SIGKILL


def together(
    config: EvaluateConfig,
    count: int,
    prepare: Callable[[int], object] = lambda rank: None,
    prompts: Sequence[Prompt] = QUESTIONS,
) -> list[int]:
    """Exit statuses of `count` processes that evaluate as under a launcher; `prepare(rank)` runs in each before."""

    def work(state: PartialState) -> None:
        evaluation.join_processes = lambda: state
        prepare(state.process_index)
        try:
            evaluate(config, prompts)
        except UserError as error:
            print(error)
            sys.exit(2)

    return launched(count, work)
