"""What a recipe makes of its settings: a `Training`, data and functions that `train.core.driver` asks for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor, nn

from train.settings.fit import FitConfig

Student = TypeVar("Student", bound=nn.Module)
Metrics = dict[str, float]
Batch = dict[str, Tensor]


class Rows(Protocol):
    """What the loop needs of a data set: `data_prep.text.rows.Rows`, or anything that maps like it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Batch: ...


@dataclass(frozen=True)
class FitResult:
    """What a run came to.

    metrics: the last evaluation, by name, empty without one. seconds: since the first step, of all runs that made it,
    evaluations and checkpoints included.
    """

    steps: int
    resumed_from: int  # 0: from the beginning
    metrics: dict[str, float]
    seconds: float

    @property
    def was_finished(self) -> bool:
        """Whether there was nothing left to do: the weights are those of an earlier call."""
        return self.resumed_from == self.steps


@dataclass(frozen=True)
class Trained:
    """What a training came to. step, metrics: of the weights that are saved, which need not be the last ones."""

    result: FitResult
    step: int
    metrics: Metrics


@dataclass(frozen=True)
class Training(Generic[Student]):
    """A recipe's part of a training: data and functions.

    student: what is trained; its forward gives the loss of a batch of `rows`. fit, identity, minutes, on_step: see
    `train.core.fit.fit`.
    evaluate: numbers by name, of the student after so many steps, without gradients. None: a process that has none.
    save: writes what is trained, and says so. The main process calls it.
    finished: the file that `save` writes last. A finished run that has it is left alone, since its card may have a
    report by now. None: it is saved again.
    best_of: what the weights with the highest "tau" of all evaluations are known by (see `Best`); they are then what is
    saved. None: the last ones are.
    saved_whole: a part of the student of which frozen parameters are saved too.
    """

    student: Student
    rows: Rows
    fit: FitConfig
    identity: Mapping[str, object]
    evaluate: Callable[[Student, int], Metrics] | None
    save: Callable[[Trained], None]
    finished: str | None = None
    best_of: Mapping[str, object] | None = None
    saved_whole: nn.Module | None = None
    on_step: Callable[[int], None] | None = None
    minutes: float | None = None
