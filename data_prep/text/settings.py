"""Settings of text sources and of prompts; light, so that a config error is reported at once.

A field made by `opt`, or with a plain default, affects results: a resumed run must agree on it; one made by `free` need
not. only(source="hub"): the field is read only with source=hub. A text after a field is its help. `Settings` runs the
`check_fields` of each class, those of bases first.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from outrider.base.errors import UserError, reason, require
from outrider.base.files import user_cache
from outrider.base.settings import Count, Named, Settings, free, only, opt
from outrider.data_prep.text.data_files import match_paths, read_file, resolve_paths
from outrider.data_prep.text.messages import SkipRecordError
from outrider.data_prep.text.prompt_records import to_prompt
from outrider.data_prep.text.records import Counts
from outrider.draft_models.targets.settings import InputPath

Layout = Literal["auto", "text", "code", "sharegpt", "messages", "turns", "alpaca", "prompts"]
# The template of a conversation: the tokenizer's own, Vicuna's, or none, the bare texts (for base models).
ChatTemplate = Literal["tokenizer", "vicuna", "none"]
PromptTemplate = Literal["auto", ChatTemplate]  # how a prompt becomes text (see `render_prompt`)
TemplateArguments = Annotated[dict[str, object], only(template=("auto", "tokenizer"))]
Order = Annotated[int, Ge(2), Le(4)]  # n of an n-gram

# Benchmarks: name, and the dataset on the Hub, commit and path of its file.
_TABLE = """
mt_bench HuggingFaceH4/mt_bench_prompts b60d01a44377daa2d9434e50a91a9e4169a090d5 raw/question.jsonl
gsm8k openai/gsm8k e53f048856ff4f594e959d75785d2c2d37b678ee main/test-00000-of-00001.parquet
humaneval openai/openai_humaneval 7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544 openai_humaneval/test-00000-of-00001.parquet
alpaca tatsu-lab/alpaca dce01c9b08f87459cf36a430d809084718273017 data/train-00000-of-00001-a09b74b3ef9c3b56.parquet
cnn_dm abisee/cnn_dailymail 96df5e686bee6baa90b8bee7c28b81fa3fa6223d 3.0.0/test-00000-of-00001.parquet
xsum EdinburghNLP/xsum 7d4d486c2f8ef850b1a11aead99b894ff3dd7da9 data/test-00000-of-00001.parquet
wmt wmt/wmt14 b199e406369ec1b7634206d3ded5ba45de2fe696 de-en/test-00000-of-00001.parquet
"""
BENCHMARKS = {name: hub_file for name, *hub_file in map(str.split, _TABLE.strip().splitlines())}
_WHAT = f"a JSONL, JSON or parquet file of prompts, or one of {', '.join(BENCHMARKS)}, which the Hub has"


@dataclass(frozen=True)
class RecordFile(InputPath):
    """The path of a file of records. check: raises `UserError` for a record at a place (file:line) with a number, and
    `SkipRecordError` for one that is left out."""

    begins: tuple[bytes, ...] = (b"",)  # the possible first bytes of a file: here any
    check: Callable[[object, str, int], object] = lambda *record: record

    def require(self, key: str, value: str) -> None:
        """Raise `UserError` also for a file without a record, and if the first one that is not left out is unusable."""
        super().require(key, value)
        if value in self.besides or not os.path.isfile(value):
            return
        first_fault = ""
        for number, record in read_file(Path(value)):
            try:
                self.check(record, where := f"{value}:{number}", number)
                return
            except SkipRecordError as error:
                first_fault = first_fault or f", the first of them at {where}: {error}"
        raise UserError(f"{key}={value}: no record in it that can be used{first_fault}; give {self.what}")


PromptFile = Annotated[str, RecordFile(_WHAT, besides=tuple(BENCHMARKS), check=to_prompt)]
PromptSource = Annotated[
    str, RecordFile(f"{_WHAT}, or python_stdlib", besides=("python_stdlib", *BENCHMARKS), check=to_prompt)
]
_OF_HUB = only(source="hub")


@dataclass(frozen=True)
class SourceConfig(Settings):
    """Where records come from and how they are read."""

    source: Literal["python_stdlib", "hub", "local", "mix"] = "python_stdlib"
    """python_stdlib (the interpreter's own library), hub (a Hugging Face dataset) or local (files)"""
    packages: Annotated[bool, only(source="python_stdlib")] = False
    """read the source of the installed packages too, about 200 MB beside torch"""
    path: Any = opt(None, "for hub the name of the dataset; for local a file, a directory, a glob, or a list of those")
    subset: Annotated[str | None, _OF_HUB] = opt(None, "of the dataset")
    data_dir: Annotated[str | None, _OF_HUB] = opt(None, "of the dataset: read this folder only")
    revision: Annotated[str | None, _OF_HUB] = opt(None, "of the dataset")
    split: Annotated[Annotated[str, Named("the name of a split")], _OF_HUB] = opt("train", "of the dataset")
    streaming: Annotated[bool, _OF_HUB] = opt(True, "passed to `datasets.load_dataset`, like the four options before")
    layout: Layout = "auto"
    """how a record is laid out; auto decides from the first record of each file or dataset. prompts: what
    evaluate-checkpoint reads, for generate-responses alone"""
    column: str | None = opt(None, "the column to read; None: the layout's usual one")
    template: ChatTemplate = "tokenizer"
    """how a conversation becomes text: tokenizer (its own chat template), vicuna, or none (its bare texts)"""
    chat_template_kwargs: Annotated[dict[str, object], only(template="tokenizer")] = field(default_factory=dict)
    """what that chat template reads besides, by name"""
    max_records: Count | None = None
    """read only this many records, counted before the train / held-out split"""
    share: Annotated[float, Gt(0), Le(1)] = 1.0
    """read only this share of the records, chosen by a hash of what the split goes by"""

    def check_fields(self) -> None:
        paths = () if self.path is None else (self.path,) if isinstance(self.path, str) else self.path
        are_texts = isinstance(paths, list | tuple) and all(isinstance(path, str) and path for path in paths)
        self.require("path", are_texts, "a string or a list of strings")
        object.__setattr__(self, "path", tuple(paths))
        if self.source in ("python_stdlib", "mix"):
            self.require("path", not self.path, f"nothing with source={self.source}")
        elif self.source == "hub":
            self.require("path", len(self.path) == 1, "one dataset name with source=hub")
        else:
            require(bool(self.path), "path", None, "a file, directory, glob or list of those with source=local")
        column_fits = self.layout != "prompts" or self.column is None
        self.require("column", column_fits, "null with layout=prompts: there the column names decide")

    def require_paths(self, is_checked: Callable[[str], bool], prefix: str = "") -> None:
        """As `Settings.require_paths`. `path` may also have patterns; one of the files must have a record."""
        super().require_paths(is_checked, prefix)
        if self.source != "local" or not is_checked(f"{prefix}.path"):
            return
        for pattern in self.path:
            require(bool(match_paths(pattern)), f"{prefix}.path", pattern, "files that are there")
        records = (record for file in resolve_paths(self.path) for record in read_file(file, Counts()))
        require(next(records, None) is not None, f"{prefix}.path", ",".join(self.path), "files with a record in them")


@dataclass(frozen=True)
class MixPart(SourceConfig):
    """One source of a mix."""

    weight: Annotated[float, Ge(0)] = 1.0
    """its share of the supervised tokens, relative to the others'; 0 leaves it out"""

    def check_fields(self) -> None:
        self.require("source", self.source != "mix", "a source that is not a mix itself")


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """One data set: a source, or with source=mix several."""

    mix: dict[str, MixPart] = field(default_factory=dict)
    """the sources by name, each with fields of its own; the fields above must then stay at their defaults"""
    heldout_fraction: Annotated[float, Ge(0), Lt(1)] = 0.05
    """share of the records kept out of training, chosen by a hash of the user's first turn or the text"""
    cache_dir: str | None = free(None, "where tokenised rows are kept; None: `user_cache()`")

    def check_fields(self) -> None:
        if self.source == "mix":
            weights = {name: part.weight for name, part in self.mix.items()}
            require(any(weights.values()), "mix", weights, "at least one source with a weight above 0")
            options = {f.name: getattr(self, f.name) for f in fields(SourceConfig) if f.name not in ("source", "path")}
            changed = next((name for name, value in options.items() if value != getattr(SourceConfig, name, {})), None)
            if changed:  # {} above: the default of a field with a factory, which is no attribute of the class
                raise UserError(f"{changed}={options[changed]!r}: says nothing with source=mix; set mix.NAME.{changed}")
        else:
            require(not self.mix, "mix", sorted(self.mix), "nothing unless source=mix")

    @property
    def cache(self) -> Path:
        return Path(os.path.expanduser(self.cache_dir)) if self.cache_dir else user_cache()

    def parts(self) -> Iterator[tuple[str, float, "DataConfig"]]:
        """(name, weight, data set) of each source of a mix with a weight above 0."""
        for name, part in self.mix.items():
            if part.weight:
                options = {f.name: getattr(part, f.name) for f in fields(SourceConfig)}
                options |= {"heldout_fraction": self.heldout_fraction, "cache_dir": self.cache_dir}
                yield name, part.weight, DataConfig(**options)


def prompt_file(name: str, option: str = "prompts") -> Path:
    """The file of prompts at the path `name`, or of the benchmark `name`, which is fetched once.

    Raises `UserError` naming the option `option` if there is no such file, or if it cannot be fetched.
    """
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path):
        return path
    if name not in BENCHMARKS:
        raise UserError(f"{option}={name}: no such file; give {_WHAT}")
    from huggingface_hub import hf_hub_download

    dataset, commit, file = BENCHMARKS[name]
    try:
        return Path(hf_hub_download(dataset, file, repo_type="dataset", revision=commit))
    except Exception as error:  # whatever the Hub client or the network raises
        raise UserError(
            f"{option}={name}: cannot be fetched from the Hugging Face Hub ({type(error).__name__}: {reason(error)}); "
            f"download https://huggingface.co/datasets/{dataset}/resolve/{commit}/{file} where there is a network, and "
            f"give that file: {option}=FILE"
        ) from error
