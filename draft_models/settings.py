"""Options that commands share which open a target; light, so that a mistake shows before torch is imported."""

from dataclasses import dataclass
from typing import Annotated, Literal

from outrider.settings import Named, RunConfig, free

Architecture = Literal["llama", "mistral", "opt", "qwen2", "qwen3"]  # those that `save_tiny_models` can make
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Model = Annotated[str, Named("a model directory or Hub name")]


@dataclass(frozen=True, kw_only=True)
class RehearsedConfig(RunConfig):
    """A command that can be rehearsed (see `draft_models.tiny_models`)."""

    debug: bool = free(False)  # a rehearsal in <out_dir>-debug: tiny random models of this architecture, little data
    debug_architecture: Architecture = free("llama")  # of those tiny models


@dataclass(frozen=True, kw_only=True)
class TargetConfig(RehearsedConfig):
    """A command that is about one target, which is known by what its files hold."""

    target: Model = free()  # model directory or Hub name
    revision: str | None = free(None)  # of the target on the Hub: branch, tag or commit
