"""`DrafterPlugin`: what commands do with the models of a kind of drafters; a `Kind` describes the kind to options."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypedDict, TypeVar, Unpack

import torch
from torch import nn
from transformers import PreTrainedConfig

from outrider.base.files import read_mapping
from outrider.base.streams import Streams
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.target import Target
from outrider.inference.core.drafter import Drafter
from outrider.inference.settings.method import MethodConfig
from outrider.inference.sizing.policy import Tuning

Model = TypeVar("Model")
Methods = Mapping[str, MethodConfig]  # by name: which drafter with which settings


class ModelOptions(TypedDict, total=False):
    """The dtype and the device of a drafter's model."""

    dtype: torch.dtype
    device: torch.device | str


@dataclass(frozen=True)
class TrainingRecord:
    """A training's seconds, the settings of its data (see `DataConfig`), its target, all its settings; None, {}: not
    recorded."""

    seconds: float | None = None
    data: dict[str, object] | None = None
    target: str | None = None
    revision: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Mapping[str, object]) -> "TrainingRecord":
        """The facts in a JSON record, whose settings are at its top or in its `settings`."""
        seconds, settings = record.get("training_seconds"), record.get("settings", record)
        settings = settings if isinstance(settings, Mapping) else {}
        train_seconds, data_config = float(seconds) if isinstance(seconds, int | float) else None, settings.get("data")
        return cls(train_seconds, data_config if isinstance(data_config, dict) else None, settings=settings)


def read_record(model_dir: str, file_name: str) -> dict[str, object]:
    """The training record in `file_name` of the model in `model_dir`; empty if there is none: it was trained elsewhere.

    Raises `UserError` where it cannot be read.
    """
    path = Path(model_dir) / file_name
    return read_mapping(path, "record of a training", "remove it, or restore it") if path.is_file() else {}


class DrafterPlugin(ABC, Generic[Model]):
    """What is done with the models of a kind. `model` is the result of its `load`; the defaults suit kinds without one.

    where: the path of a model, as the user gives it, or its directory.
    has_card: whether a model's directory has a README.md, to which an evaluation adds its report.
    own_sessions: its sessions split the target at another layer than plain decoding's, so they have separate caches.
    """

    has_card: ClassVar[bool] = False
    own_sessions: ClassVar[bool] = False

    @abstractmethod
    def make(
        self, model: Model, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        """A new drafter for one generation.

        drawn: drafts are sampled from q; tuning: the measured costs of passes, for settings that are "auto".
        """

    def load(self, where: str, target: OpenTarget, methods: Methods, **options: Unpack[ModelOptions]) -> Model:
        """The model in `where`, for this target and these methods. Raises `UserError` if it is unusable.

        A kind that sees tokens only asks nothing of `target` but `vocabulary_digest` and `vocabulary_size`.
        """
        raise TypeError(f"{type(self).__name__}: a kind with an option for its model's place needs a `load` of its own")

    def prepare(self, model: Model, target: Target) -> None:
        """Make the model ready to decode beside `target`."""
        return

    def identity(self, where: str | None) -> dict[str, object]:
        """All of the model in `where` that determines results, as JSON; the same keys without a model."""
        return {}

    def is_in(self, folder: str) -> bool:
        """Whether `folder`, which has `Kind.file`, holds this kind, as several kinds may have such a file.

        Raises `UserError` if it cannot be read.
        """
        return True

    def read_with(self, changes: ReadingChanges) -> "DrafterPlugin[Model]":
        """A variant that reads models with `changes`; the same object for kinds that have none."""
        return self

    def is_foreign(self, where: str, target: OpenTarget) -> bool:
        """Whether another trainer wrote this checkpoint, so that its config may be misinterpreted."""
        return False

    def require_fits(self, method: MethodConfig, layer_count: int) -> None:
        """Raise `UserError` if `method` does not fit a target of `layer_count` layers; only for kinds with `layers`."""
        return

    def causal_lms(self, model: Model) -> list[Target]:
        """The causal LMs that it runs in sessions of their own."""
        return []

    def draft_vocabulary(self, where: str) -> Sequence[int] | None:
        """The draft vocabulary of the model in `where`; None: all tokens."""
        return None

    def training_record(self, where: str) -> TrainingRecord:
        """The record of the training of the model in `where`."""
        return TrainingRecord()

    def empty_model(self, where: str, target: PreTrainedConfig) -> nn.Module | None:
        """The model in `where`, for a target of this config, without weights; None: it takes next to no memory."""
        return None

    def digest(self, where: str) -> str:
        """A digest of the weights in `where` and of how they are read, to which a calibration head is bound.

        Called if `Kind.calibration` is given. Raises `UserError` if they cannot be read.
        """
        raise TypeError(f"{type(self).__name__}: a kind that a calibration head belongs to needs a `digest` of its own")

    def vllm_method(self, where: str, target: OpenTarget) -> str | None:
        """vLLM's method for the model in `where`; None: that of its kind (see `Kind.vllm_method`)."""
        return None

    def export(self, where: str, target: OpenTarget, dtype: torch.dtype, folder: Path) -> None:
        """Write the model in `where` to `folder` as serving engines load it; called if it is a model of theirs.

        Raises `UserError` for a model that they cannot run.
        """
        raise TypeError(f"{type(self).__name__}: a kind that engines load needs an `export` of its own")


AnyPlugin = DrafterPlugin[Any]  # of a kind that is only known when it runs
