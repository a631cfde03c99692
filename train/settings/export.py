"""Settings of export. Light on purpose: a mistake shows before torch is imported."""

from dataclasses import dataclass
from typing import Annotated, Literal

from outrider.base.settings import RunConfig, free, only, opt
from outrider.draft_models.targets.settings import AnyDrafter, EnginePython, FloatDtype, Model, ReadingChanges

Engine = Literal["vllm", "sglang", "transformers", "llama_cpp", "openvino"]
# The dtypes that the format of an engine does not have. An engine that is not listed has all dtypes.
_MISSING_DTYPES: dict[Engine, tuple[FloatDtype, ...]] = {
    "llama_cpp": ("float64",),
    "openvino": ("float64", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True)
class ExportConfig(RunConfig):
    """export: a drafter as serving engines load it."""

    checkpoint: AnyDrafter = free()
    """directory of an early exit, of an n-gram table, or of an EAGLE-3 head, of any trainer; also of a small LM or of a
    target, for an engine with a format of its own"""
    target: Model | None = free(None)
    """directory, GGUF file or Hub name of the drafter's target; null: for an early exit the target that its record
    names, for a table any target. Of the target of a head only config.json is read, and for llama.cpp the tokenizer. Of
    the target of a table the tokenizer is read too"""
    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit")
    reading: ReadingChanges = opt(factory=ReadingChanges, help="corrections of an EAGLE-3 head's config.json")
    engine: Engine = opt("vllm", "the engine that will load it")
    engine_python: Annotated[EnginePython | None, only(engine="openvino")] = free(None)
    """environment with OpenVINO, or its Python, whose optimum-cli converts the drafter; null: the environment of this
    command"""
    dtype: FloatDtype | None = None
    """dtype of the written weights (a table has none); null: the dtype of the head or small LM, or of an early exit's
    target, but with engine=openvino float16 instead of bfloat16"""
    out_dir: str = free("runs/export", "where the files go; resume=true replaces a model that is there")

    def __post_init__(self) -> None:
        super().__post_init__()
        has_dtype = self.dtype not in _MISSING_DTYPES.get(self.engine, ())
        self.require("dtype", has_dtype, f"another one, which engine={self.engine} has")
