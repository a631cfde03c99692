"""The kinds of drafters, by the name that a method's `source` has: the only list of them.

A kind says here what settings need to know, without importing torch. Everything else that the rest of the runtime asks
of a kind is its `Maker`, which is imported when a method of that kind is used.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar, Unpack

from draft_models.targets.settings import HEAD_FOLDER
from outrider.files import read_mapping

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from draft_models.eagle3.changes import ReadingChanges
    from draft_models.targets.open_target import OpenTarget
    from draft_models.targets.target import Target
    from inference.core.drafter import Drafter, DraftModel
    from inference.engines.footprint import Place
    from inference.settings.method import MethodConfig
    from inference.sizing.policy import Tuning
    from outrider.streams import Streams


Model = TypeVar("Model")


class Placed(TypedDict, total=False):
    """Where the model of a kind that runs one goes."""

    dtype: "torch.dtype"
    device: "torch.device | str"


class Maker(ABC, Generic[Model]):
    """What decoding asks of a kind. `model` is whatever its `load` returned; the defaults suit a kind without one."""

    def lies_in(self, folder: str) -> bool:
        """Whether `folder`, which has `Kind.file`, holds a model of this kind; asked where other kinds have that too.

        Raises `UserError` where it cannot be read.
        """
        return True

    def identity(self, where: str | None) -> dict[str, object]:
        """What of the model in `where` decides results, JSON-able, with the same keys where there is none."""
        return {}

    def load(
        self, where: str, target: "OpenTarget", methods: Mapping[str, "MethodConfig"], **placed: Unpack[Placed]
    ) -> Model:
        """The model in `where`, for this target and these methods. Raises `UserError` where it is unusable.

        A kind that sees tokens only asks nothing of `target` but `vocabulary_digest` and `vocabulary_size`.
        """
        raise TypeError(f"{type(self).__name__}: a kind with an option for its model's place needs a `load` of its own")

    def reading(self, changes: "ReadingChanges") -> "Maker[Model]":
        """One that reads models with `changes`; itself where the kind is read in one way only."""
        return self

    def foreign(self, where: str, target: "OpenTarget") -> bool:
        """Whether the model in `where` was written by others, in words that may be read wrongly."""
        return False

    def prepare(self, model: Model, target: "Target") -> None:
        """Make the model ready to decode beside `target`."""
        return

    def context(self, model: Model) -> int | None:
        """The positions that the model can hold, None where it has no limit of its own."""
        return None

    def finish(self, model: Model) -> None:
        """Decoding has ended: save what is to outlive it. Raises `UserError`."""
        return

    def release(self, method: "MethodConfig") -> None:
        """Nobody decodes by `method` any more: leave to other processes what was opened for it. Raises `UserError`."""
        return

    def own_models(self, model: Model) -> "list[Target]":
        """The causal LMs that it runs in sessions of their own."""
        return []

    def known_tokens(self, where: str) -> "Sequence[int] | None":
        """The only tokens that the model in `where` predicts; None for all."""
        return None

    def trained_seconds(self, where: str) -> float | None:
        """How long the model in `where` trained; None where it does not say."""
        return None

    def data_of(self, where: str) -> dict[str, object] | None:
        """The settings (see `DataConfig`) of the text that the model in `where` learned from; None: it does not say."""
        return None

    def held(self, where: str, target: "PreTrainedConfig", place: "Place") -> dict[str, int]:
        """Bytes that the model in `where` and its sessions take on every process, by what they are."""
        return {}

    def require_fits(self, method: "MethodConfig", layers: int) -> None:
        """Raise `UserError` where `method` means nothing for a target of `layers` layers; asked where `Kind.layers`."""
        return

    def digest(self, where: str) -> str:
        """Of the weights in `where`, and of how they are read: what a calibration head is bound to.

        Asked where `Kind.calibration` is given. Raises `UserError` where they cannot be read.
        """
        raise TypeError(f"{type(self).__name__}: a kind that a calibration head belongs to needs a `digest` of its own")

    def draft_model(self, model: Model, method: "MethodConfig") -> "DraftModel":
        """A `DraftModel`, fresh for one generation; asked where `Kind.shaped`."""
        raise TypeError(f"{type(self).__name__}: a kind that a structure shapes needs a `draft_model` of its own")

    @abstractmethod
    def make(
        self, model: Model, method: "MethodConfig", streams: "Streams", *, drawn: bool, tuning: "Tuning | None"
    ) -> "Drafter":
        """A drafter, fresh for one generation (see `new_drafter`)."""


def read_record(where: str, file: str) -> dict[str, object]:
    """What a training left in `file` beside the model in `where`; empty where there is none: it was trained elsewhere.

    Raises `UserError` where it cannot be read.
    """
    path = Path(where) / file
    return read_mapping(path, "record of a training", "remove it, or restore it") if path.is_file() else {}


def recorded_seconds(facts: object) -> float | None:
    """The `training_seconds` in what a training has left about itself, as JSON; None where they are not in it."""
    seconds = facts.get("training_seconds") if isinstance(facts, dict) else None
    return float(seconds) if isinstance(seconds, int | float) else None


def recorded_data(settings: object) -> dict[str, object] | None:
    """The `data` in the settings that a training has left about itself, as JSON; None where they are not in it."""
    data = settings.get("data") if isinstance(settings, dict) else None
    return data if isinstance(data, dict) else None


@dataclass(frozen=True)
class Kind:
    """What settings need to know of a kind of drafter.

    maker: "module:name" of its `Maker`.
    option: the option of evaluate-checkpoint that says where its model lies; None: it has no model.
    needs: what has to lie there; "": it has no model.
    file: a file that its model's directory has; None: `checkpoint` does not take it.
    preset: the method of conf/method/ that a model alone decodes by.
    shaped: a structure and a stop rule shape its drafts.
    own: the fields of a method, or of its stop rule as "stop.max_draft", that it reads besides. No kind reads
    another's.
    calibration: the folder in its model's directory where a calibration head lies, "" the directory itself; None: it
    has no hidden states that a head could read, or no directory. Other engines read every *.safetensors file that lies
    beside a model's own, so a head beside one of theirs has a folder.
    card: its directory has a README.md.
    tiny: what `save_tiny_models` calls one of it. layers: it drafts on layers of the target, which must run by layers.
    """

    name: str
    maker: str
    option: str | None = None
    needs: str = ""
    file: str | None = None
    preset: str | None = None
    shaped: bool = True
    own: tuple[str, ...] = ()
    calibration: str | None = None
    card: bool = False
    tiny: str | None = None
    layers: bool = False

    @property
    def sees_tokens_only(self) -> bool:
        """Whether a recording can stand in for the target."""
        return not self.shaped

    def head_folder(self, where: str) -> Path | None:
        """Where a calibration head of the model in `where` lies, if there is one; None: it can have none."""
        return None if self.calibration is None else Path(where) / self.calibration

    def load_maker(self) -> Maker[Any]:
        """Its `Maker`."""
        module, _, name = self.maker.partition(":")
        maker: Maker[Any] = getattr(import_module(module), name)
        return maker


KINDS: dict[str, Kind] = {}


def kind_in(folder: str) -> Kind | None:
    """The kind of drafter whose model the directory `folder` holds; None where there is no such directory, or none.

    Raises `UserError` where it cannot be read.
    """
    kinds = [kind for kind in KINDS.values() if kind.file is not None and (Path(folder) / kind.file).is_file()]
    return next((kind for kind in kinds if len(kinds) == 1 or kind.load_maker().lies_in(folder)), None)


def presets_of(given: Mapping[str, str | None]) -> list[str]:
    """The methods by which the drafters decode that are `given`, by option, where none is chosen.

    `checkpoint` may hold any kind. Where it holds none the method is an early exit's, which then says what is missing.
    Raises `UserError` where it cannot be read.
    """
    kinds = [kind for kind in KINDS.values() if kind.option is not None and given.get(kind.option)]
    held = [(kind_in(str(given["checkpoint"])) if kind.option == "checkpoint" else None) or kind for kind in kinds]
    return [*dict.fromkeys(kind.preset for kind in held if kind.preset is not None)]


def register(kind: Kind) -> Kind:
    """Make `kind` known; a name is given once."""
    if kind.name in KINDS:
        raise ValueError(f"a kind of drafter called {kind.name!r} is registered already")
    KINDS[kind.name] = kind
    return kind


register(
    Kind(
        "early_exit",
        "inference.drafters.early_exit:MAKER",
        option="checkpoint",
        needs="an early-exit drafter directory",
        file="drafter.json",
        preset="eesd_survival",
        calibration="",
        card=True,
        tiny="early_exit",
        layers=True,
    )
)
register(
    Kind(
        "small_lm",
        "inference.drafters.small_lm:MAKER",
        option="small_lm",
        needs="a causal LM directory or Hub name",
        file="config.json",
        preset="vanilla",
        calibration=HEAD_FOLDER,
        card=True,
        tiny="small_lm",
    )
)
register(
    Kind(
        "eagle3",
        "inference.drafters.eagle3:MAKER",
        option="eagle3",
        needs="a directory or Hub name of an EAGLE-3 head",
        file="config.json",
        preset="eagle3",
        calibration=HEAD_FOLDER,
        card=True,
        tiny="eagle3",
        layers=True,
    )
)
register(Kind("skip_layers", "inference.drafters.skip_layers:MAKER", own=("skip",), layers=True))
register(
    Kind(
        "prompt_lookup",
        "inference.drafters.ngram.lookup:MAKER",
        shaped=False,
        own=("max_ngram", "stop.max_draft"),
    )
)
register(
    Kind(
        "ngrams",
        "inference.drafters.ngram.ngrams:MAKER",
        option="table",
        needs="an n-gram table directory (data_prep/build_trigrams.py)",
        file="table.json",
        preset="ngrams",
        shaped=False,
        own=("ngrams",),
        tiny="table",
    )
)
