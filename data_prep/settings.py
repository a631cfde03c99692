"""Where training text comes from and how it is read; light, so that a config error shows at once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_models.errors import UserError, require, require_choice

SOURCES = ("python_stdlib", "hub", "local")
LAYOUTS = ("auto", "text", "code", "sharegpt", "messages", "turns", "alpaca")
TEMPLATES = ("tokenizer", "vicuna")


@dataclass(frozen=True)
class DataConfig:
    """One data set.

    source: python_stdlib (the interpreter's own library), hub (a Hugging Face dataset) or local (files).
    path: the dataset's name for hub; for local a file, a directory, a glob, or a list of those.
    subset, data_dir, revision, split, streaming: handed to `datasets.load_dataset` (hub only).
    layout: how a record is laid out; auto decides from the first record of each file or dataset.
    column: the column to read; None: the layout's usual one.
    template: how a conversation becomes text: the tokenizer's own chat template, or Vicuna's.
    max_records: read only this many records, counted before the train / held-out split.
    heldout_fraction: share of the records kept out of training, chosen by a hash of each record.
    cache_dir: where tokenised rows are kept; None: `default_cache_dir()`.
    """

    source: str = "python_stdlib"
    path: Any = None  # a string or a list of strings: OmegaConf has no such union. Kept as a tuple
    subset: str | None = None
    data_dir: str | None = None
    revision: str | None = None
    split: str = "train"
    streaming: bool = True
    layout: str = "auto"
    column: str | None = None
    template: str = "tokenizer"
    max_records: int | None = None
    heldout_fraction: float = 0.05
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        require_choice("source", self.source, SOURCES)
        require_choice("layout", self.layout, LAYOUTS)
        require_choice("template", self.template, TEMPLATES)
        object.__setattr__(self, "path", _as_tuple(self.path))
        if self.source == "python_stdlib":
            require(not self.path, "path", self.path, "nothing with source=python_stdlib")
        elif self.source == "hub":
            require(len(self.path) == 1, "path", self.path, "one dataset name with source=hub")
        else:
            require(bool(self.path), "path", None, "a file, directory, glob or list of those with source=local")
        require(bool(self.split), "split", self.split, "the name of a split of the hub dataset")
        require(
            self.max_records is None or self.max_records > 0,
            "max_records",
            self.max_records,
            "at least 1, or null",
        )
        require(
            0 <= self.heldout_fraction < 1,
            "heldout_fraction",
            self.heldout_fraction,
            "at least 0 and less than 1",
        )

    @property
    def cache(self) -> Path:
        """The directory of the tokenised rows."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else default_cache_dir()


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def _as_tuple(path: object) -> tuple[str, ...]:
    items = () if path is None else (path,) if isinstance(path, str) else path
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise UserError(f"path={path!r}: expected a string or a list of strings")
    return tuple(items)
