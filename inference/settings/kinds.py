"""The registry of drafter kinds, by the name that a method's `source` has.

A kind's entry holds what settings need, without importing torch. The rest of the runtime uses its `DrafterPlugin`,
which is imported when a method of that kind is used.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack

from outrider.base.files import read_mapping
from outrider.draft_models.targets import settings as names
from outrider.draft_models.targets.settings import HEAD_FOLDER

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig

    from outrider.base.streams import Streams
    from outrider.draft_models.targets.open_target import OpenTarget
    from outrider.draft_models.targets.settings import ReadingChanges
    from outrider.draft_models.targets.target import Target
    from outrider.inference.core.drafter import Drafter
    from outrider.inference.settings.method import MethodConfig
    from outrider.inference.sizing.policy import Tuning


Model = TypeVar("Model")


class Placed(TypedDict, total=False):
    """The dtype and the device of a drafter's model."""

    dtype: "torch.dtype"
    device: "torch.device | str"


class DrafterPlugin(ABC, Generic[Model]):
    """A kind's functions. `model` is the object that its `load` returned; the defaults suit a kind without a model."""

    def lies_in(self, folder: str) -> bool:
        """Whether `folder`, which has `Kind.file`, holds this kind; asked before an earlier kind that has such a file.

        Raises `UserError` if it cannot be read.
        """
        return True

    def identity(self, where: str | None) -> dict[str, object]:
        """The identity of the model in `where` that determines results, JSON-able; the same keys without a model."""
        return {}

    def load(
        self, where: str, target: "OpenTarget", methods: Mapping[str, "MethodConfig"], **tensor_options: Unpack[Placed]
    ) -> Model:
        """The model in `where`, for this target and these methods. Raises `UserError` if it is unusable.

        A kind that sees tokens only asks nothing of `target` but `vocabulary_digest` and `vocabulary_size`.
        """
        raise TypeError(f"{type(self).__name__}: a kind with an option for its model's place needs a `load` of its own")

    def reading(self, changes: "ReadingChanges") -> "DrafterPlugin[Model]":
        """A variant that reads models with `changes`; the same object for kinds that have none."""
        return self

    def foreign(self, where: str, target: "OpenTarget") -> bool:
        """Whether another trainer wrote this checkpoint, so that its config may be misinterpreted."""
        return False

    def prepare(self, model: Model, target: "Target") -> None:
        """Make the model ready to decode beside `target`."""
        return

    def own_models(self, model: Model) -> "list[Target]":
        """The causal LMs that it runs in sessions of their own."""
        return []

    def known_tokens(self, where: str) -> "Sequence[int] | None":
        """The draft vocabulary of the model in `where`; None: all tokens."""
        return None

    def trained(self, where: str) -> "Trained":
        """The record of the training of the model in `where`."""
        return Trained()

    def empty(self, where: str, target: "PreTrainedConfig") -> "nn.Module | None":
        """The model in `where`, for a target of this config, without weights; None: it takes next to no memory."""
        return None

    def require_fits(self, method: "MethodConfig", layers: int) -> None:
        """Raise `UserError` if `method` does not fit a target of `layers` layers; called if `Kind.layers`."""
        return

    def digest(self, where: str) -> str:
        """A digest of the weights in `where` and of how they are read, to which a calibration head is bound.

        Called if `Kind.calibration` is given. Raises `UserError` if they cannot be read.
        """
        raise TypeError(f"{type(self).__name__}: a kind that a calibration head belongs to needs a `digest` of its own")

    def serve(self, where: str, target: "OpenTarget", dtype: "torch.dtype", folder: Path) -> None:
        """Write the model in `where` to `folder` as serving engines load it; called if it is a model of theirs.

        Raises `UserError` for a model that they cannot run.
        """
        raise TypeError(f"{type(self).__name__}: a kind that engines load needs a `serve` of its own")

    @abstractmethod
    def make(
        self, model: Model, method: "MethodConfig", streams: "Streams", *, drawn: bool, tuning: "Tuning | None"
    ) -> "Drafter":
        """A new drafter for one generation (see `new_drafter`)."""


Plugin = DrafterPlugin[Any]  # of a kind that is only known when it runs


@dataclass(frozen=True)
class Trained:
    """A training's seconds, the settings of its data (see `DataConfig`), and its target; None: not recorded."""

    seconds: float | None = None
    data: dict[str, object] | None = None
    target: str | None = None
    revision: str | None = None

    @classmethod
    def of(cls, record: Mapping[str, object]) -> "Trained":
        """The facts in a JSON record; those of the data are at its top or in its `settings`."""
        seconds, settings = record.get("training_seconds"), record.get("settings", record)
        data = settings.get("data") if isinstance(settings, Mapping) else None
        duration = float(seconds) if isinstance(seconds, int | float) else None
        return cls(duration, data if isinstance(data, dict) else None)


def read_record(where: str, file: str) -> dict[str, object]:
    """The training record in `file` of the model in `where`; empty if there is none: it was trained elsewhere.

    Raises `UserError` where it cannot be read.
    """
    path = Path(where) / file
    return read_mapping(path, "record of a training", "remove it, or restore it") if path.is_file() else {}


@dataclass(frozen=True)
class Kind:
    """A registry entry: what settings need to know of a kind of drafter.

    plugin: "module:name" of its `DrafterPlugin`.
    option: the option of evaluate-checkpoint that names its model's path; None: it has no model.
    needs: what must be at that path; "": it has no model.
    file: a file in its model's directory; None: `checkpoint` does not accept it.
    preset: the method that is used for such a model by default.
    shaped: whether a structure and a stop rule shape its drafts; of others, which see tokens only, a recording can
    replace the target.
    keys: further fields that only this kind reads: of a method, or of its stop rule, as in "stop.max_draft".
    calibration: the folder of a calibration head in its model's directory, "" for the directory itself; None: it has no
    hidden states that a head could read, or no directory. Other engines read every *.safetensors file in a model's
    directory, so a head for a model in their format needs a separate folder.
    card: whether its directory has a README.md.
    served: the method of vLLM that drafts with it; None: only this runtime does.
    step: of the pipeline, makes its model.
    worth: by device, the place in which `outrider auto` trains it; without one it is not trained there by itself.
    measured: the methods that it measures then.
    layers: it drafts with layers of the target, which must run layer by layer.
    own_sessions: the target has caches of its own in its sessions, which are split at another layer than plain ones.
    """

    name: str
    plugin: str
    option: str | None = None
    needs: str = ""
    file: str | None = None
    preset: str | None = None
    shaped: bool = True
    keys: tuple[str, ...] = ()
    calibration: str | None = None
    card: bool = False
    served: str | None = None
    step: str | None = None
    worth: Mapping[str, int] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    layers: bool = False
    own_sessions: bool = False

    def load_plugin(self) -> "Plugin":
        """Its `DrafterPlugin`."""
        module, _, name = self.plugin.partition(":")
        plugin: Plugin = getattr(import_module(module), name)
        return plugin


KINDS: dict[str, Kind] = {}


def kind_in(folder: str) -> Kind | None:
    """The kind of drafter whose model is in the directory `folder`; None if there is none.

    Raises `UserError` where it cannot be read.
    """
    kinds = [kind for kind in KINDS.values() if kind.file is not None and os.path.isfile(Path(folder, kind.file))]
    return next((kind for kind in reversed(kinds) if kind is kinds[0] or kind.load_plugin().lies_in(folder)), None)


def presets_of(paths: Mapping[str, str | None], *, fixed: bool = False) -> list[str]:
    """The default methods for the drafters in `paths`, by option, if no method is chosen.

    `checkpoint` may hold any kind. If it holds none, the method is the early exit's, whose loading reports the error.
    fixed: models draft chains of fixed length. Raises `UserError` if it cannot be read.
    """
    kinds = [kind for kind in KINDS.values() if kind.option is not None and paths.get(kind.option)]
    held = [(kind_in(str(paths["checkpoint"])) if kind.option == "checkpoint" else None) or kind for kind in kinds]
    presets = (f"{kind.name}/fixed" if fixed and kind.shaped else kind.preset for kind in held)
    return [*dict.fromkeys(name for name in presets if name is not None)]


def register(kind: Kind) -> Kind:
    """Add `kind` to the registry; names are unique."""
    if kind.name in KINDS:
        raise ValueError(f"a kind of drafter called {kind.name!r} is registered already")
    KINDS[kind.name] = kind
    return kind


EARLY_EXIT = register(
    Kind(
        names.EARLY_EXIT,
        "outrider.inference.drafters.early_exit:PLUGIN",
        option="checkpoint",
        needs="an early-exit drafter directory",
        file="drafter.json",
        preset="eesd_survival",
        calibration="",
        card=True,
        served="draft_model",
        step="eesd",
        worth={"cpu": 1, "cuda": 2},
        measured=("eesd_survival", "early_exit/opt_tree_auto"),
        layers=True,
        own_sessions=True,
    )
)
SMALL_LM = register(
    Kind(
        names.SMALL_LM,
        "outrider.inference.drafters.small_lm:PLUGIN",
        option=names.SMALL_LM,
        needs="a causal LM (directory, GGUF file or Hub name)",
        file="config.json",
        preset="small_lm/survival",
        calibration=HEAD_FOLDER,
        card=True,
        served="draft_model",
        step=names.SMALL_LM,
        worth={"cpu": 2, "cuda": 3},
        measured=("small_lm/survival", "opt_tree_auto"),
    )
)
EAGLE3 = register(
    Kind(
        names.EAGLE3,
        "outrider.inference.drafters.eagle3:PLUGIN",
        option=names.EAGLE3,
        needs="a directory or Hub name of an EAGLE-3 head",
        file="config.json",
        preset="eagle3/survival",
        calibration=HEAD_FOLDER,
        card=True,
        served=names.EAGLE3,
        step=names.EAGLE3,
        worth={"cuda": 1},
        measured=("eagle3/survival", "eagle3/opt_tree_auto"),
        layers=True,
    )
)
register(Kind("skip_layers", "outrider.inference.drafters.skip_layers:PLUGIN", keys=("skip",), layers=True))
PROMPT_LOOKUP = register(
    Kind(
        "prompt_lookup",
        "outrider.inference.drafters.ngram.lookup:PLUGIN",
        shaped=False,
        keys=("max_ngram", "stop.max_draft"),
        served="ngram",
    )
)
NGRAMS = register(
    Kind(
        "ngrams",
        "outrider.inference.drafters.ngram.ngrams:PLUGIN",
        option=names.TABLE,
        needs="an n-gram table directory (outrider build-trigrams)",
        file="table.safetensors",
        preset="ngrams",
        shaped=False,
        keys=("ngrams",),
        served="custom_class",
        step="trigrams",
    )
)
