"""What the loop trains and returns: a student, rows of text, and the result of a run."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from outrider.base.errors import UserError

Metrics = dict[str, float]
Batch = dict[str, Tensor]
TOP_K = ("top_ids", "top_logprobs", "tail")  # of a batch, what of the target's distribution it may have


class Student(nn.Module):
    """A module that learns. Only its parameters that require a gradient are trained, saved and restored.

    `forward(**row batch)` is the training step. It returns {"loss_sum": scalar}, the loss SUMMED over the supervised
    positions (labels != IGNORE). The loop divides it by the number of these positions in the global batch.
    """

    step = 0  # the number of optimizer steps before this one, on which what a student draws depends

    def begin_step(self, step: int) -> None:
        """Called on every process before optimizer step `step`, which counts from 0."""
        self.step = step

    def gradient_checkpointing_enable(self) -> None:
        """Keep fewer activations, and compute them again in the backward pass."""
        raise UserError("gradient_checkpointing=true: this model does not support it")

    def count_parameters(self) -> tuple[int, int]:
        """The numbers of trained and of frozen parameters."""
        sizes = [(p.numel(), p.requires_grad) for p in self.parameters()]
        return sum(size for size, trained in sizes if trained), sum(size for size, trained in sizes if not trained)

    @property
    def saved_part(self) -> nn.Module | None:
        """The part whose frozen parameters are saved too; None: only trained parameters are saved."""
        return None


class TrainRows(Protocol):
    """The data set interface of the loop: `data_prep.text.rows.PackedRows`, or any similar map-style data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Batch: ...


@dataclass(frozen=True)
class FitResult:
    """The result of a training.

    steps: of the whole run. resumed_from: the step it went on from; `steps` if nothing was left to do. seconds: since
    the first step, of the original and resumed runs, evaluations and checkpoints included. last_metrics: the last
    evaluation, empty without one. step, metrics: of the weights that the student has, the last or the best ones.
    """

    steps: int
    resumed_from: int
    seconds: float
    last_metrics: Metrics
    step: int
    metrics: Metrics
