"""The one way in which a command trains: its directory, the fit, the best weights of all evaluations, what is saved.

What differs from one thing trained to another is a recipe (train/recipes/). It makes a `Training` of its settings.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from accelerate import PartialState
from torch import nn

from outrider.files import require_writable
from outrider.processes import join_processes, only_run_of
from outrider.settings import RunConfig
from train.core import run_dir, sharding
from train.core.best import BEST_FOLDER, Best
from train.core.fit import Evaluate, fit
from train.core.training import Metrics, Student, Trained, Training


def run_training(config: RunConfig, prepare: Callable[[PartialState], Training[Student]], *also: str) -> None:
    """Train what `prepare` makes, in `config.out_dir`. Every process calls it, and `prepare` too.

    No other run writes to that directory meanwhile, nor to those of `also`. Raises `UserError` where one is in use or
    cannot be written, where out_dir holds a run that is not to be resumed, and as `prepare` and `fit` do.
    """
    state = join_processes()
    with ExitStack() as held:
        for folder in {Path(path).resolve(): path for path in (config.out_dir, *also)}.values():
            held.enter_context(only_run_of(state, require_writable(folder), "a training"))
        run_dir.require_free(Path(config.out_dir), config.resume)
        _run(config, prepare(state), state)
        state.wait_for_everyone()


def _run(config: RunConfig, training: Training[Student], state: PartialState) -> None:
    out_dir, student = Path(config.out_dir), training.student
    best = None if training.best_of is None else Best(out_dir / BEST_FOLDER, training.best_of, config)
    result = fit(
        student,
        training.rows,
        training.fit,
        out_dir,
        resume=config.resume,
        identity=training.identity,
        settings=config,
        evaluate=_evaluation(training, best),
        on_step=training.on_step,
        minutes=training.minutes,
    )
    if training.saved_whole is not None:
        sharding.make_whole(training.saved_whole, frozen=True)
    if not state.is_main_process:
        return
    if training.finished is not None and result.was_finished and (out_dir / training.finished).exists():
        print(f"{out_dir}: finished already", flush=True)
        return
    step, metrics = (result.steps, result.metrics) if best is None else best.restore(student)
    training.save(Trained(result, step, metrics))


def _evaluation(training: Training[Student], best: Best | None) -> Evaluate:
    """The evaluation as `fit` calls it. It offers the weights to `best` where something was measured."""

    def evaluate(_: nn.Module, step: int) -> Metrics:
        metrics = {} if training.evaluate is None else training.evaluate(training.student, step)
        if best is not None and metrics:
            best.offer(training.student, step, metrics)
        return metrics

    return evaluate
