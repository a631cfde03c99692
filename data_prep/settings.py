"""Where training text comes from and how it is read; light, so that a config error shows at once."""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from inference.settings import ARCHITECTURES, DTYPES, SamplingConfig
from outrider.errors import UserError, require, require_choice

SOURCES = ("python_stdlib", "hub", "local", "mix")
LAYOUTS = ("auto", "text", "code", "sharegpt", "messages", "turns", "alpaca")
TEMPLATES = ("tokenizer", "vicuna")


@dataclass(frozen=True)
class SourceConfig:
    """Where records come from and how they are read.

    source: python_stdlib (the interpreter's own library), hub (a Hugging Face dataset) or local (files).
    packages: for python_stdlib: read the source of the installed packages too, about 200 MB beside torch.
    path: for hub the name of the dataset; for local a file, a directory, a glob, or a list of those.
    streaming: for hub only, as subset, data_dir, revision and split are: handed to `datasets.load_dataset`.
    layout: how a record is laid out; auto decides from the first record of each file or dataset.
    column: the column to read; None: the layout's usual one.
    template: how a conversation becomes text: tokenizer (its own chat template) or vicuna.
    max_records: read only this many records, counted before the train / held-out split.
    """

    source: str = "python_stdlib"
    packages: bool = False
    path: Any = None
    subset: str | None = None  # of a dataset on the Hub
    data_dir: str | None = None  # of a dataset on the Hub: read this folder only
    revision: str | None = None  # of a dataset on the Hub
    split: str = "train"  # of a dataset on the Hub
    streaming: bool = True
    layout: str = "auto"
    column: str | None = None
    template: str = "tokenizer"
    max_records: int | None = None

    def __post_init__(self) -> None:
        require_choice("source", self.source, SOURCES)
        require_choice("layout", self.layout, LAYOUTS)
        require_choice("template", self.template, TEMPLATES)
        object.__setattr__(self, "path", _as_tuple(self.path))
        if self.source in ("python_stdlib", "mix"):
            require(not self.path, "path", self.path, f"nothing with source={self.source}")
        elif self.source == "hub":
            require(len(self.path) == 1, "path", self.path, "one dataset name with source=hub")
        else:
            require(bool(self.path), "path", None, "a file, directory, glob or list of those with source=local")
        only_library = self.source == "python_stdlib" or not self.packages
        require(only_library, "packages", self.packages, f"false with source={self.source}")
        if self.source in ("local", "python_stdlib"):
            for key in ("subset", "data_dir", "revision", "split", "streaming"):
                unset = getattr(SourceConfig, key)
                require(getattr(self, key) == unset, key, getattr(self, key), f"{unset}: it is for source=hub alone")
        require(bool(self.split), "split", self.split, "the name of a split of the hub dataset")
        require(
            self.max_records is None or self.max_records > 0,
            "max_records",
            self.max_records,
            "at least 1, or null",
        )


@dataclass(frozen=True)
class MixPart(SourceConfig):
    """One source of a mix. weight: its share of the supervised tokens, relative to the others'; 0 leaves it out."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.source != "mix", "source", self.source, "a source that is not a mix itself")
        require(0 <= self.weight < math.inf, "weight", self.weight, "a number ≥ 0")


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """One data set: a source, or with source=mix several.

    mix: the sources by name, each read as its own fields say; the fields above are then left alone.
    heldout_fraction: share of the records kept out of training, chosen by a hash of each record.
    cache_dir: where tokenised rows are kept; None: `default_cache_dir()`.
    """

    mix: dict[str, MixPart] = field(default_factory=dict)
    heldout_fraction: float = 0.05
    cache_dir: str | None = None

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

    def deciding(self) -> dict[str, Any]:
        """The options that decide the rows; where they are cached does not."""
        return {key: value for key, value in asdict(self).items() if key != "cache_dir"}

    def parts(self) -> Iterator[tuple[str, float, "DataConfig"]]:
        """(name, weight, data set) of each source of a mix that is not left out."""
        for name, part in self.mix.items():
            if part.weight:
                own = {f.name: getattr(part, f.name) for f in fields(SourceConfig)}
                own |= {"heldout_fraction": self.heldout_fraction, "cache_dir": self.cache_dir}
                yield name, part.weight, DataConfig(**own)


@dataclass(frozen=True)
class GenerateConfig:
    """generate-responses: the target answers the prompts of a data set, for training a drafter on what it says."""

    target: str  # model directory or Hub name: a causal LM of transformers whose forward takes past_key_values
    data: DataConfig  # whose user turns, or beginnings of plain texts, are the prompts; held-out records are left out
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    turns: str = "all"  # conversations: answer all user turns, each after the target's own answers, or the first
    prefix_tokens: int = 64  # plain text: tokens of a text to continue; of a text shorter than twice that, half
    max_new_tokens: int = 512  # per answer
    greedy_tokens: int = 4  # the first of every answer are the likeliest tokens, the rest are sampled
    temperature: float = 1.0  # of the sampled tokens
    top_k: int = 0  # sample among the k likeliest tokens; 0: all
    top_p: float = 1.0  # sample among the likeliest tokens that together have this probability; 1: all
    keep_truncated: bool = True  # false: drop answers that reached max_new_tokens without an end
    top_k_logits: int = 0  # also keep the target's k largest log-probabilities at every token, for distillation
    batch_size: int = 32  # prompts decoded together by one process
    shard_size: int = 512  # prompts in one file; a killed process repeats at most shard_size + batch_size - 1
    dtype: str = "auto"  # auto: float32 on CPU, else the target's own
    device_map: str | None = None  # auto spreads a large target over all GPUs of one process
    seed: int = 0  # with a prompt's id it decides the answer
    out_dir: str = "runs/generate_responses"  # where everything goes
    resume: bool = False  # go on with what an earlier run left in out_dir
    debug: bool = False  # a rehearsal in <out_dir>-debug: tiny random models of this architecture, little data
    debug_architecture: str = "llama"  # see ARCHITECTURES in inference/settings.py

    def __post_init__(self) -> None:
        require(bool(self.target), "target", self.target, "a model directory or Hub name")
        weights = {name: weight for name, weight, _ in self.data.parts()}
        require(
            len(set(weights.values())) <= 1,
            "data.mix weights",
            weights,
            "equal weights (or 0, to leave a source out): every prompt is answered; weigh when training",
        )
        require_choice("turns", self.turns, ("all", "first"))
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("debug_architecture", self.debug_architecture, ARCHITECTURES)
        for key in ("prefix_tokens", "max_new_tokens", "batch_size", "shard_size"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "an integer ≥ 1")
        for key in ("greedy_tokens", "top_k_logits"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "an integer ≥ 0")
        require(0 <= self.seed < 2**31, "seed", self.seed, "0 to 2^31 - 1")
        _ = self.sampling  # has checks of its own

    @property
    def sampling(self) -> SamplingConfig:
        """How tokens after the greedy ones are drawn."""
        return SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True)
class TrigramConfig:
    """build-trigrams: a corpus and a tokenizer in, an n-gram table out.

    Of the corpus, `data.template` and `data.cache_dir` say nothing here: turns of a conversation are tokenised as
    plain texts of their own, and no n-gram reaches over two of them.
    """

    tokenizer: str  # SentencePiece model file, or the directory or Hub name of a Hugging Face tokenizer
    data: DataConfig  # its held-out records are left out
    revision: str | None = None  # of a tokenizer on the Hub
    text: str = "assistant"  # of a conversation: assistant (what a target generates) or all turns
    orders: tuple[int, ...] = (3,)  # n of the n-grams to count: some of 2, 3, 4
    min_count: int = 2  # n-grams of fewer occurrences are left out
    max_successors: int | None = None  # only this many successors of a context, the most frequent; null: all
    merge: tuple[str, ...] = ()  # finished tables whose counts are added to the corpus's own, in memory
    workers: int | None = None  # tokenising processes; null: one for each CPU core
    memory_gb: float = 1.0  # what counting may take, beside the program and the text of the largest record
    out_dir: str = "runs/trigrams"  # where everything goes
    resume: bool = False  # go on with what an earlier run left in out_dir
    debug: bool = False  # a rehearsal in <out_dir>-debug: tiny random models of this architecture, little data
    debug_architecture: str = "llama"  # see ARCHITECTURES in inference/settings.py

    def __post_init__(self) -> None:
        require(bool(self.tokenizer), "tokenizer", self.tokenizer, "a SentencePiece model file, directory or Hub name")
        require(self.data.source != "mix", "data.source", "mix", "one source (build the others first, add with merge)")
        require_choice("text", self.text, ("assistant", "all"))
        require_choice("debug_architecture", self.debug_architecture, ARCHITECTURES)
        valid = bool(self.orders) and set(self.orders) <= {2, 3, 4} and len(set(self.orders)) == len(self.orders)
        require(valid, "orders", self.orders, "some of 2, 3, 4, each once")
        require(self.min_count >= 1, "min_count", self.min_count, "an integer ≥ 1")
        require(
            self.max_successors is None or self.max_successors >= 1,
            "max_successors",
            self.max_successors,
            "null or an integer ≥ 1",
        )
        require(self.workers is None or self.workers >= 1, "workers", self.workers, "null or an integer ≥ 1")
        require(0.1 <= self.memory_gb < math.inf, "memory_gb", self.memory_gb, "a number ≥ 0.1")

    @property
    def processes(self) -> int:
        """Tokenising processes."""
        return self.workers or os.cpu_count() or 1

    def corpus(self) -> dict[str, Any]:
        """What decides which text is counted, JSON-able."""
        names = ("source", "packages", "subset", "data_dir", "revision", "split", "layout", "column", "max_records")
        own = {name: getattr(self.data, name) for name in (*names, "heldout_fraction")}
        return {**own, "path": list(self.data.path), "text": self.text}


@dataclass(frozen=True)
class ConvertConfig:
    """convert-target: a target of any readable format in, an ordinary directory of safetensors out.

    dtype: auto keeps the type of every tensor; quantised ones become float32.
    """

    target: str  # GGUF file, model directory or Hub name
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    dtype: str = "auto"
    shard_gb: float = 5.0  # the largest file of weights
    out_dir: str = "runs/convert_target"  # where everything goes
    resume: bool = False  # go on with what an earlier run left in out_dir

    def __post_init__(self) -> None:
        require(bool(self.target), "target", self.target, "a GGUF file, model directory or Hub name")
        require_choice("dtype", self.dtype, DTYPES)
        require(0.0 < self.shard_gb < math.inf, "shard_gb", self.shard_gb, "a positive number")


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def _as_tuple(path: object) -> tuple[str, ...]:
    items = () if path is None else (path,) if isinstance(path, str) else path
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise UserError(f"path={path!r}: expected a string or a list of strings")
    return tuple(items)
