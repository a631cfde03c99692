"""`Training`: the data and functions that a recipe makes from its settings for `train.core.driver`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from outrider.inference.loading.memory_plan import Memory
from outrider.train.settings.fit import FitConfig

Student = TypeVar("Student", bound=nn.Module)
Metrics = dict[str, float]
Batch = dict[str, Tensor]


class TrainRows(Protocol):
    """The data set interface of the loop: `data_prep.text.rows.PackedRows`, or any similar map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Batch: ...


@dataclass(frozen=True)
class FitResult:
    """The result of a run.

    metrics: the last evaluation, by name, empty without one. seconds: since the first step, summed over the original
    and resumed runs, evaluations and checkpoints included.
    """

    steps: int
    resumed_from: int  # 0: from the beginning; as many as `steps`: nothing was left to do
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Trained:
    """The result of a training. step, metrics: of the saved weights, which need not be the last ones."""

    result: FitResult
    step: int
    metrics: Metrics


@dataclass(frozen=True)
class Training(Generic[Student]):
    """A recipe's part of a training: data and functions.

    student: `forward(**row batch)` returns {"loss_sum": scalar}, the loss SUMMED over the supervised positions (labels
    != IGNORE). The loop divides it by the number of these positions in the global batch. Only parameters that require a
    gradient are trained, saved and restored.
    identity: JSON-able, everything that determines the result besides `fit`: data, model, their seeds.
    evaluate: called on every process, every `eval_every` steps and at the end, with the student in eval mode, without
    gradients, and with the number of steps done. The metrics it returns are logged as eval_<name>. None: not done here.
    save: writes the trained model and prints a line. The main process calls it.
    finished: the file that `save` writes last. A finished run with this file is not saved again, since its card may
    contain a report by now. None: it is saved again.
    keeps_best: the weights with the highest "tau" of all evaluations (see `Best`) are saved, not the last ones.
    saved_whole: the part of the student whose frozen parameters are saved too.
    on_step: called on every process before each optimizer step, with its number (from 0).
    minutes: the time limit for the last step. The number of steps is then at most that of `fit`.
    """

    student: Student
    rows: TrainRows
    fit: FitConfig
    identity: Mapping[str, object] = field(default_factory=dict)
    evaluate: Callable[[Student, int], Metrics] | None = None
    save: Callable[[Trained], None] = lambda trained: None
    finished: str | None = None
    keeps_best: bool = False
    saved_whole: nn.Module | None = None
    on_step: Callable[[int], None] | None = None
    minutes: float | None = None


@dataclass(frozen=True)
class Plan:
    """The memory of each device in a training, computed without weights. facts: printed above it."""

    held: Sequence[Memory]
    facts: Mapping[str, object]
