"""Plugins of kinds with a draft model, and the calibration heads that some stop rules ask.

A plugin does what commands do with models of a kind of drafters; `where` is the path of a model. A calibration head
estimates from a drafter's hidden states whether its next token will be accepted.
"""

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Unpack, cast

from outrider.base.streams import Streams
from outrider.draft_models.calibration import META_FILE, drafter_digest, load_calibration
from outrider.draft_models.calibration_head import AcceptanceHead
from outrider.draft_models.targets.fingerprint import model_identity
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.drafter import Drafter, DraftModel
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.plugin import DrafterPlugin, Methods, Model, ModelOptions, TrainingRecord, read_record
from outrider.inference.settings.kind import Kind
from outrider.inference.settings.method import MethodConfig
from outrider.inference.shapes.factory import Structure, make_structure
from outrider.inference.sizing.policy import Tuning


@dataclass(frozen=True)
class Calibrated(Generic[Model]):
    """A drafter of any kind with hidden states, and its calibration head, which some stop rules ask."""

    drafter: Model
    head: AcceptanceHead | None = None  # None: no method uses one


def without_calibration(model: Model | Calibrated[Model]) -> Model:
    """The drafter without its calibration head, if `model` is `Calibrated`."""
    return model.drafter if isinstance(model, Calibrated) else model


def head_identity(kind: Kind, drafter_path: str | None) -> str | None:
    """A short hash of the metadata of the calibration head of the drafter in `drafter_path`; None without a head."""
    if drafter_path is None or kind.calibration is None:
        return None
    metadata_path = Path(drafter_path) / kind.calibration / META_FILE
    return hashlib.sha256(metadata_path.read_bytes()).hexdigest()[:16] if metadata_path.is_file() else None


def make_prompt_lookup(method: MethodConfig, structure: Structure, tuning: Tuning | None = None) -> Drafter | None:
    """The drafter that copies from the text before a drafter of `method` is asked; None if `copy` is no n-gram length.

    It drafts as many tokens as the costs in `tuning` make worthwhile; without `tuning` as many as `structure` allows.
    """
    if not isinstance(method.copy, int):
        return None
    # Only the costs of `tuning` count: its evidence is about the model's drafts. shared: by the texts of a batch.
    if tuning is not None:
        copy_tuning = Tuning(tuning.costs)
        tuning = copy_tuning if tuning.shared is None else copy_tuning.of_all(tuning.shared().sharing)
    return PromptLookup(method.copy, structure.max_rows, tuning, min_ngram=method.copy)  # n-grams of one length


class ModelDrafterPlugin(DrafterPlugin[Model]):
    """The plugin of a kind with a `draft_model`, whose drafts a structure (chain or tree) shapes."""

    @abstractmethod
    def draft_model(self, model: Model, method: MethodConfig) -> DraftModel:
        """A new `DraftModel` for one generation."""

    def make(
        self, model: Model, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        head = model.head if isinstance(model, Calibrated) else None
        structure = make_structure(method, streams, drawn, head, tuning)
        draft_model = self.draft_model(without_calibration(model), method)
        allowance = None if tuning is None else tuning.allowance()
        return ModelDrafter(draft_model, structure, allowance, make_prompt_lookup(method, structure, tuning))


class TrainedDrafterPlugin(ModelDrafterPlugin[Model]):
    """The plugin of a kind with a model of its own, to which a calibration head may belong.

    A model is `Calibrated` if a method uses its head. record: the file of its training.
    """

    kind: ClassVar[Kind]
    record: ClassVar[str]
    has_card = True

    @abstractmethod
    def load_drafter(self, where: str, target: OpenTarget, **options: Unpack[ModelOptions]) -> Model:
        """The drafter without a calibration head (see `load`)."""

    def load(self, where: str, target: OpenTarget, methods: Methods, **options: Unpack[ModelOptions]) -> Model:
        if not self.asks_head(methods):
            return self.load_drafter(where, target, **options)
        target_identity, head_folder = target.identity if target.is_seen else None, self.kind.calibration or ""
        head = load_calibration(where, self.digest(where), options["device"], target_identity, folder=head_folder)
        # The large weights are read last, as a wrong head raises `UserError` at once.
        return cast("Model", Calibrated(self.load_drafter(where, target, **options), head))

    def asks_head(self, methods: Methods) -> bool:
        """Whether a stop rule of a method with this kind asks for a calibration head."""
        return any(method.source == self.kind.name and method.stop.needs_head for method in methods.values())

    def identity(self, where: str | None) -> dict[str, object]:
        weights_identity = None if where is None else model_identity(open_tensors(where))
        name = self.kind.name
        return {name: weights_identity, f"{name}_calibration": head_identity(self.kind, where)}

    def digest(self, where: str) -> str:
        return drafter_digest(open_tensors(where))

    def training_record(self, where: str) -> TrainingRecord:
        return TrainingRecord.of(read_record(where, self.record))
