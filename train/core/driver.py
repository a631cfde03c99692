"""`training_run`: the frame of every training. A file of train/ enters it, builds a student, fits it and saves it.

A student is the module to train, with its loss. A plan lists the memory that the training takes.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from outrider.base.errors import UserError, reason, warn
from outrider.base.files import parse_json, require_writable, write_atomically
from outrider.base.processes import from_main, join_processes, only_run_of
from outrider.base.settings import RunConfig, construct
from outrider.inference.loading.memory_plan import Plan, explain_out_of_memory
from outrider.train.core import run_dir, sharding
from outrider.train.core.fit import fit
from outrider.train.core.sharding import WEIGHTS_FILE, load_trained, trained_parameters
from outrider.train.core.training import FitResult, Metrics, Student, TrainRows
from outrider.train.settings.fit import FitConfig

BEST_FOLDER = "best"
Value = TypeVar("Value")


@contextmanager
def training_run(
    config: RunConfig, make_plan: Callable[[], Plan] | None = None, *drafter_dirs: str
) -> Iterator["TrainingRun"]:
    """A training in `config.out_dir`. Every process enters it, before it reads data or weights.

    It joins the processes of a launcher, and locks out_dir and the folders of `drafter_dirs` against other runs. An
    out-of-memory error becomes one that lists the parts of `make_plan()`. Raises `UserError` if a folder is in use or
    not writable, and if out_dir holds a run and resume is off.
    """
    with ExitStack() as stack:
        if make_plan is not None:
            stack.enter_context(explain_out_of_memory(lambda: make_plan().parts))
        state = join_processes()
        if isinstance(fit_config := getattr(config, "fit", None), FitConfig):
            fit_config.require_processes(state.num_processes)
        for folder in {Path(path).resolve(): path for path in (config.out_dir, *drafter_dirs)}.values():
            # Only the run in out_dir records its start, so that a resumed one writes the same date into chats.
            option, resume = ("out_dir", config.resume) if folder == config.out_dir else ("checkpoint", None)
            locked_dir = require_writable(folder, option)
            stack.enter_context(only_run_of(state, locked_dir, "a training", resume))
        run_dir.require_free(Path(config.out_dir), config.resume)
        yield TrainingRun(Path(config.out_dir), config.resume, state)
        state.wait_for_everyone()


@dataclass(frozen=True)
class TrainingRun:
    """An entered `training_run`: its directory, whether it resumes an earlier run, and this process."""

    out_dir: Path
    resume: bool
    state: PartialState

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.state.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that evaluates and saves."""
        return self.state.is_main_process

    def from_main(self, make: Callable[[], Value]) -> Value:
        """The result of `make()`, which only the main process calls, on every process."""
        return from_main(self.state, make)

    def fit(
        self,
        student: Student,
        rows: TrainRows,
        config: FitConfig,
        *,
        identity: Mapping[str, object],
        evaluate: Callable[[int], Metrics] | None = None,
        saved_dtype: torch.dtype | None = None,
        keeps_best: bool = False,
        last_file: str | None = None,
        minutes: float | None = None,
    ) -> FitResult | None:
        """Train `student` on `rows` by `fit`. A resumed run must have the same `identity`. Every process calls it.

        saved_dtype: of the weights that the caller writes; evaluations then have `norms_moved`. keeps_best: the weights
        with the highest "tau" of all evaluations are put back (see `BestWeights`), else the last ones stay.
        last_file: the file that the caller writes last. A finished run that has it is not saved again, since its card
        may contain a report by now.
        Returns None where nothing is to be saved: in such a run, and on all processes but the main one.
        """
        best = BestWeights(self.out_dir / BEST_FOLDER) if keeps_best else None
        if self.is_main and not run_dir.checkpoints(self.out_dir):
            shutil.rmtree(self.out_dir / BEST_FOLDER, ignore_errors=True)  # of a run killed before its first checkpoint
        start_norms = {} if saved_dtype is None else copies_of_norms(student, saved_dtype)

        def evaluate_and_keep(step: int) -> Metrics:
            metrics = {} if evaluate is None else evaluate(step)
            if metrics and start_norms and saved_dtype is not None:
                metrics |= norms_moved(start_norms, copies_of_norms(student, saved_dtype), step)
            if best is not None and metrics:
                best.offer(student, step, metrics)
            return metrics

        def forget_saved() -> None:
            """A run that was longer before is not finished until its drafter is saved anew."""
            if last_file is not None:
                (self.out_dir / last_file).unlink(missing_ok=True)

        result = fit(
            student, rows, config, self.out_dir, identity=identity, evaluate=evaluate_and_keep, minutes=minutes,
            resume=self.resume, before_last_save=forget_saved,
        )  # fmt: skip
        if student.saved_part is not None:  # the caller also writes the frozen parameters, which may be sharded
            sharding.make_whole(student.saved_part, frozen=True)
        if not self.is_main:
            return None
        is_saved = last_file is not None and (self.out_dir / last_file).exists()
        if is_saved and result.resumed_from == result.steps:
            print(f"{self.out_dir}: finished already", flush=True)
            return None
        if best is None:
            return result
        step, metrics = best.restore(student)
        return replace(result, step=step, metrics=metrics)


class BestWeights:
    """The trained weights with the highest τ so far, in one file, which is written atomically.

    A killed run finds them again. Evaluations are a function of the step, so those that a resumed run repeats change
    nothing.
    """

    def __init__(self, folder: Path):
        self.file = folder / WEIGHTS_FILE

    def offer(self, student: nn.Module, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the student's weights if they are better. Raises `UserError` where they cannot be written."""
        if self.file.exists() and self._read_header()[1]["tau"] >= metrics["tau"]:  # [1]: the metrics of the best
            return
        weights = {name: p.detach().cpu().contiguous() for name, p in trained_parameters(student).items()}
        header = {"step": str(step), "metrics": json.dumps(dict(metrics))}
        require_writable(self.file.parent)
        write_atomically(self.file, save(weights, metadata=header))

    def restore(self, student: nn.Module) -> tuple[int, Metrics]:
        """Put the best weights back; returns their step and metrics. Raises `UserError` where they are gone."""
        step, metrics = self._read_header()
        load_trained(student, self.file.parent)
        return step, metrics

    def _read_header(self) -> tuple[int, Metrics]:
        try:
            with safe_open(self.file, framework="pt") as stored:
                header = stored.metadata() or {}
            return int(header["step"]), construct(Metrics, parse_json(header["metrics"]))
        except (OSError, SafetensorError, KeyError, ValueError, UserError) as error:
            raise UserError(f"{self.file}: the best weights are missing or damaged ({reason(error)}); remove "
                            f"{self.file.parent.parent} and train again") from None  # fmt: skip


def copies_of_norms(student: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The trained weights of norms in `dtype`, by name."""
    trained = trained_parameters(student).items()
    return {name: p.detach().to(dtype, copy=True) for name, p in trained if p.ndim == 1 and "norm" in name}


def norms_moved(start_norms: Mapping[str, Tensor], trained_norms: Mapping[str, Tensor], step: int) -> Metrics:
    """norms_moved: the share of the trained norms that differ from their start in the dtype they are saved in.

    It warns if no norm has moved: near 1, bfloat16 has steps of 0.8 %.
    """
    moved_count = sum(not torch.equal(norm, trained_norms[name]) for name, norm in start_norms.items())
    if not moved_count:
        dtype = next(iter(start_norms.values())).dtype
        problem = f"none of the {len(start_norms)} trained norms has moved, rounded to {dtype}"
        warn(f"step {step}: {problem}; raise lr or train longer")
    return {"norms_moved": moved_count / len(start_norms)}
