"""What the loop trains and returns: a student, rows of text, and the result of a run."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from outrider.base.errors import UserError

Metrics = dict[str, float]
Batch = dict[str, Tensor]
# Keys of a batch with the target's k most likely tokens, their log-probabilities, and the probability of all others.
TOP_K = ("top_ids", "top_logprobs", "tail")


class Student(nn.Module):
    """A module that learns. Only its parameters that require a gradient are trained, saved and restored.

    `forward(**batch)` is the training step, on a batch of `TrainRows`. It returns {"loss_sum": scalar}, the loss SUMMED
    over the supervised positions (labels != IGNORE). The loop divides the sum by the number of these positions in the
    global batch.
    """

    step = 0  # the number of optimizer steps before this one; a student's random draws depend on the number

    def begin_step(self, step: int) -> None:
        """Called on every process before optimizer step `step`, which counts from 0."""
        self.step = step

    def gradient_checkpointing_enable(self) -> None:
        """Keep fewer activations, and compute them again in the backward pass. Raises `UserError` unless overridden."""
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
    """A map-style data set of packed rows: `data_prep.text.rows.PackedRows`, or another with its interface.

    An item has int64 [T] each: input_ids; labels, the next token or IGNORE; positions, from 0 in each document; and
    documents, the number of each token's document in the row, −1 for padding.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Batch: ...


@dataclass(frozen=True)
class FitResult:
    """The result of a training.

    steps: of the whole run. resumed_from: the step at which this process began; `steps` if nothing was left to do.
    seconds: since the first step, of the original and resumed runs, evaluations and checkpoints included. last_metrics:
    the last evaluation, empty without one. step, metrics: of the weights that the student has, the last or the best.
    """

    steps: int
    resumed_from: int
    seconds: float
    last_metrics: Metrics
    step: int
    metrics: Metrics
