"""Where training text comes from and how it is read; light, so that a config error shows at once."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from draft_models.settings import TARGET, Dtype, Model, RehearsedConfig, TargetConfig
from inference.settings import SamplingConfig
from outrider.errors import UserError, require
from outrider.settings import Count, Named, RunConfig, Seed, Settings, above, at_least, at_most, below, free

Layout = Literal["auto", "text", "code", "sharegpt", "messages", "turns", "alpaca"]
REHEARSED_RECORDS = 10  # files of the standard library; half of them held out
Order = Annotated[int, at_least(2), at_most(4)]  # n of an n-gram
NotNegative = Annotated[int, at_least(0)]


@dataclass(frozen=True)
class SourceConfig(Settings):
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
    template: Literal["tokenizer", "vicuna"] = "tokenizer"
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
        if self.source in ("local", "python_stdlib"):
            for key in ("subset", "data_dir", "revision", "split", "streaming"):
                unset = getattr(SourceConfig, key)
                require(getattr(self, key) == unset, key, getattr(self, key), f"{unset}: it is for source=hub alone")


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
class GenerateConfig(TargetConfig):
    """generate-responses: the target answers the prompts of a data set, for training a drafter on what it says."""

    # model directory or Hub name: a causal LM of transformers whose forward takes past_key_values
    target: Model = free()
    # whose user turns, or beginnings of plain texts, are the prompts; held-out records are left out; it may grow
    data: DataConfig = free()
    # conversations: answer all user turns, each after the target's own answers, or the first
    turns: Literal["all", "first"] = "all"
    prefix_tokens: Count = 64  # plain text: tokens of a text to continue; of a text shorter than twice that, half
    max_new_tokens: Count = 512  # per answer
    greedy_tokens: NotNegative = 4  # the first of every answer are the likeliest tokens, the rest are sampled
    temperature: float = 1.0  # of the sampled tokens
    top_k: int = 0  # sample among the k likeliest tokens; 0: all
    top_p: float = 1.0  # sample among the likeliest tokens that together have this probability; 1: all
    keep_truncated: bool = True  # false: drop answers that reached max_new_tokens without an end
    top_k_logits: NotNegative = 0  # also keep the target's k largest log-probabilities at every token, for distillation
    batch_size: Count = free(32)  # prompts decoded together by one process
    # prompts in one file; a killed process repeats at most shard_size + batch_size - 1
    shard_size: Count = free(512)
    dtype: Dtype = "auto"  # auto: float32 on CPU, else the target's own
    device_map: str | None = free(None)  # auto spreads a large target over all GPUs of one process
    seed: Seed = 0  # with a prompt's id it decides the answer
    out_dir: str = free("runs/generate_responses")  # where everything goes

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = {name: weight for name, weight, _ in self.data.parts()}
        require(
            len(set(weights.values())) <= 1,
            "data.mix weights",
            weights,
            "equal weights (or 0, to leave a source out): every prompt is answered; weigh when training",
        )
        _ = self.sampling  # has checks of its own

    def small(self, models: Path) -> Self:
        """A few short answers of a tiny target."""
        limits = self.cut(prefix_tokens=24, max_new_tokens=12, top_k_logits=8, batch_size=8, shard_size=8)
        given: dict[str, Any] = {**limits, "data": self.data.small(models)}
        return replace(self, target=str(models / TARGET), revision=None, **given)

    @property
    def sampling(self) -> SamplingConfig:
        """How tokens after the greedy ones are drawn."""
        return SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


@dataclass(frozen=True, kw_only=True)
class TrigramConfig(RehearsedConfig):
    """build-trigrams: a corpus and a tokenizer in, an n-gram table out.

    Of the corpus, `data.template` and `data.cache_dir` say nothing here: turns of a conversation are tokenised as
    plain texts of their own, and no n-gram reaches over two of them.
    """

    # SentencePiece model file, or the directory or Hub name of a Hugging Face tokenizer
    tokenizer: Annotated[str, Named("a SentencePiece model file, directory or Hub name")] = free()
    data: DataConfig  # its held-out records are left out
    revision: str | None = free(None)  # of a tokenizer on the Hub
    text: Literal["assistant", "all"] = "assistant"  # of a conversation: what a target generates, or all turns
    orders: tuple[Order, ...] = (3,)  # n of the n-grams to count, each once
    min_count: Count = 2  # n-grams of fewer occurrences are left out
    max_successors: Count | None = None  # only this many successors of a context, the most frequent; null: all
    merge: tuple[str, ...] = ()  # finished tables whose counts are added to the corpus's own, in memory
    workers: Count | None = free(None)  # tokenising processes; null: one for each CPU core
    # what counting may take, beside the program and the text of the largest record
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

    target: Annotated[str, Named("a GGUF file, model directory or Hub name")]  # what is converted
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    out_dir: str = free("runs/convert_target")  # where everything goes
    dtype: Dtype = "auto"  # of what is written; auto: the type of every tensor, of quantised ones float32
    shard_gb: Annotated[float, above(0)] = 5.0  # the largest file of weights


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/outrider, or ~/.cache/outrider."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def _as_tuple(path: object) -> tuple[str, ...]:
    items = () if path is None else (path,) if isinstance(path, str) else path
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise UserError(f"path={path!r}: expected a string or a list of strings")
    return tuple(items)
