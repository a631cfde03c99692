"""Options shared by commands that open a target; light, so that a mistake is reported before torch is imported."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from outrider.settings import Place, RunConfig, free

Architecture = Literal["llama", "mistral", "opt", "qwen2", "qwen3"]  # those that `save_tiny_models` can make
FloatDtype = Literal["float32", "bfloat16", "float16", "float64"]
Dtype = Literal["auto", FloatDtype]
RunDtype = Literal["auto", "fast", FloatDtype]  # see `pick_dtype`
DecodeDtype = Literal["auto", "fast", "int8", FloatDtype]  # int8: see `draft_models.targets.int8`
# see draft_models/losses.py
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "acceptance", "kl_tv"]
Dialect = Literal["eagle", "specforge", "speculators", "modelopt"]  # of EAGLE-3 heads (draft_models/eagle3/dialects.py)
MODEL = "a Hugging Face model directory, a GGUF file or a Hub name (OWNER/NAME)"
Model = Annotated[str, Place(MODEL, hub=True)]
Head = Annotated[str, Place("a directory or Hub name of an EAGLE-3 head", hub=True)]
DrafterFolder = Annotated[str, Place("the directory of a drafter")]
TableFolder = Annotated[str, Place("the directory of an n-gram table (outrider build-trigrams)")]
# see `save_tiny_models`
TARGET, SMALL_LM, EARLY_EXIT, EAGLE3, TABLE = "target", "small_lm", "early_exit", "eagle3", "table"
HEAD_FOLDER = "calibration"  # folder of a calibration head in a drafter's directory that other engines read too


@dataclass(frozen=True, kw_only=True)
class RehearsedConfig(RunConfig, ABC):
    """A command that can be rehearsed (see `data_prep.text.rehearsal`)."""

    # a rehearsal in <out_dir>-debug: target, data and prompts that the command line gives are looked at, then all runs
    debug: bool = free(False)  # on tiny random models and little data
    debug_architecture: Architecture = free("llama")  # of those tiny models; without it that of a target that is given

    @abstractmethod
    def small(self, models: Path) -> Self:
        """The same command at almost no cost, on the models that `save_tiny_models` wrote to the folder `models`."""

    def cut(self, **limits: int) -> Self:
        """The same with each named field, unless it is null, reduced to at most its limit."""
        given = {name: getattr(self, name) for name in limits}
        return replace(self, **{name: min(value, limits[name]) for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class TargetConfig(RehearsedConfig):
    """A command that is about one target, which is known by what its files hold."""

    target: Model = free()  # model directory, GGUF file or Hub name
    revision: str | None = free(None)  # of the target on the Hub: branch, tag or commit
