"""The registry of the kinds of drafters, by the name that a method's `source` has."""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from outrider.draft_models.targets import settings as names
from outrider.inference.settings.kind import Kind

KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Add `kind` to the registry; names are unique."""
    if kind.name in KINDS:
        raise ValueError(f"a kind of drafter called {kind.name!r} is registered already")
    KINDS[kind.name] = kind
    return kind


# A folder a kind: its `KIND` is the description, which imports no torch. The order decides in `kind_in`.
_MODEL_KINDS = (names.EARLY_EXIT, names.SMALL_LM, names.EAGLE3, names.MTP, names.DFLASH)
for _folder in (*_MODEL_KINDS, "skip_layers", "prompt_lookup", "ngrams"):
    register(import_module(f"outrider.inference.drafters.{_folder}").KIND)

EARLY_EXIT, SMALL_LM, EAGLE3, MTP, DFLASH = (KINDS[name] for name in _MODEL_KINDS)
PROMPT_LOOKUP, NGRAMS = KINDS["prompt_lookup"], KINDS["ngrams"]
READABLE = [kind for kind in KINDS.values() if kind.readings]  # whose files may be read in several ways


def kind_in(folder: str) -> Kind | None:
    """The kind of drafter whose model is in the directory `folder`; None if there is none.

    Raises `UserError` if the model cannot be read. A folder with the files of several kinds is of the last kind that
    accepts the folder (`is_in`), else of the first kind.
    """
    kinds = [kind for kind in KINDS.values() if kind.file is not None and os.path.isfile(Path(folder, kind.file))]
    return next((kind for kind in reversed(kinds) if kind is kinds[0] or kind.load_plugin().is_in(folder)), None)


def presets_of(option_paths: Mapping[str, str | None], *, fixed: bool = False) -> list[str]:
    """The default methods for the drafters in `option_paths`, by option, if no method is chosen.

    `checkpoint` may hold any kind. If it holds none, the method is the early exit's, whose loading reports the error.
    fixed: models draft chains of fixed length. Raises `UserError` if `checkpoint` cannot be read.
    """
    kinds = [kind for kind in KINDS.values() if kind.option is not None and option_paths.get(kind.option)]
    checkpoint_kind = kind_in(str(option_paths["checkpoint"])) if option_paths.get("checkpoint") else None
    kinds = [checkpoint_kind or kind if kind.option == "checkpoint" else kind for kind in kinds]
    preset_names = (f"{kind.name}/fixed" if fixed and kind.shaped else kind.preset for kind in kinds)
    return [*dict.fromkeys(name for name in preset_names if name is not None)]
