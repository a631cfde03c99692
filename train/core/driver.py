"""The training driver of all commands: output directory, fit, best weights of all evaluations, saving.

Everything specific to one kind of model is in its recipe (train/recipes/), which makes a `Training` from its settings.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from outrider.base.errors import UserError, reason
from outrider.base.files import parse_json, require_writable, write_atomically
from outrider.base.processes import join_processes, only_run_of
from outrider.base.settings import RunConfig, construct
from outrider.inference.loading.memory_plan import describe, explain_out_of_memory, planned_device
from outrider.train.core import run_dir, sharding
from outrider.train.core.fit import fit
from outrider.train.core.sharding import WEIGHTS_FILE, load_trained, trained_parameters
from outrider.train.core.training import Metrics, Plan, Student, Trained, Training

BEST_FOLDER = "best"


class Best:
    """The trained weights with the highest τ so far, in one file that is the old one or all of the new.

    A killed run finds them again. Evaluations are a function of the step, so those that a resumed run repeats change
    nothing.
    """

    def __init__(self, folder: Path):
        self.file = folder / WEIGHTS_FILE

    def offer(self, student: nn.Module, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the student's weights if they are better. Raises `UserError` where they cannot be written."""
        if self.file.exists() and self._described()[1]["tau"] >= metrics["tau"]:
            return
        weights = {name: p.detach().cpu().contiguous() for name, p in trained_parameters(student).items()}
        described = {"step": str(step), "metrics": json.dumps(dict(metrics))}
        require_writable(self.file.parent)
        write_atomically(self.file, save(weights, metadata=described))

    def restore(self, student: nn.Module) -> tuple[int, dict[str, float]]:
        """Put the best weights back; returns their step and metrics. Raises `UserError` where they are gone."""
        described = self._described()
        load_trained(student, self.file.parent)
        return described

    def _described(self) -> tuple[int, dict[str, float]]:
        try:
            with safe_open(self.file, framework="pt") as stored:
                described = stored.metadata() or {}
            return int(described["step"]), construct(dict[str, float], parse_json(described["metrics"]))
        except (OSError, SafetensorError, KeyError, ValueError, UserError) as error:
            raise UserError(f"{self.file}: the best weights are missing or damaged ({reason(error)}); remove "
                            f"{self.file.parent.parent} and train again") from None  # fmt: skip


def train(
    config: RunConfig, plan: Callable[[], Plan], prepare: Callable[[PartialState], Training[Student]], *also: str
) -> None:
    """Run the training that `prepare` returns, in `config.out_dir`; with plan=true only print its `plan`.

    Every process calls it and `prepare`. Locks out_dir and those of `also` against other runs. Raises `UserError` if
    one of them is in use or not writable, if out_dir holds a run and resume is off, if memory does not suffice (it then
    says the plan), and whenever `prepare` and `fit` do.
    """
    if getattr(config, "plan", False):
        planned = plan()
        print(describe(planned.held, planned_device(), **planned.facts), flush=True)
        return
    with explain_out_of_memory(lambda: plan().held):
        run_training(config, prepare, *also)


def run_training(config: RunConfig, prepare: Callable[[PartialState], Training[Student]], *also: str) -> None:
    """`train` without a plan."""
    state = join_processes()
    with ExitStack() as held:
        for folder in {Path(path).resolve(): path for path in (config.out_dir, *also)}.values():
            option, resume = ("out_dir", config.resume) if folder == config.out_dir else ("checkpoint", None)
            held.enter_context(only_run_of(state, require_writable(folder, option), "a training", resume))
        run_dir.require_free(Path(config.out_dir), config.resume)
        _run(config, prepare(state), state)
        state.wait_for_everyone()


def _run(config: RunConfig, training: Training[Student], state: PartialState) -> None:
    out_dir, student = Path(config.out_dir), training.student
    best = Best(out_dir / BEST_FOLDER) if training.keeps_best else None
    if state.is_main_process and not run_dir.checkpoints(out_dir):
        shutil.rmtree(out_dir / BEST_FOLDER, ignore_errors=True)  # of a run that was killed before its first checkpoint
    result = fit(replace(training, evaluate=_evaluation(training, best)), out_dir, resume=config.resume)
    if training.saved_whole is not None:
        sharding.make_whole(training.saved_whole, frozen=True)
    if not state.is_main_process:
        return
    is_saved = training.finished is not None and (out_dir / training.finished).exists()
    if is_saved and result.resumed_from == result.steps:
        print(f"{out_dir}: finished already", flush=True)
        return
    step, metrics = (result.steps, result.metrics) if best is None else best.restore(student)
    training.save(Trained(result, step, metrics))


def _evaluation(training: Training[Student], best: Best | None) -> Callable[[Student, int], Metrics]:
    """The evaluation that `fit` calls. It offers the weights to `best` if it measured anything."""

    def evaluate(student: Student, step: int) -> Metrics:
        metrics = {} if training.evaluate is None else training.evaluate(student, step)
        if best is not None and metrics:
            best.offer(student, step, metrics)
        return metrics

    return evaluate
