"""Settings of export; a field by `free` affects no result. Light: a mistake shows before torch is imported."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from outrider.base.settings import RunConfig, free, only, opt
from outrider.draft_models.targets.settings import AnyDrafter, EnginePython, FloatDtype, Model, ReadingChanges

Engine = Literal["vllm", "sglang", "transformers", "llama_cpp", "openvino"]
QuantisedDtype = Literal["q8_0", "q5_0", "q4_0"]  # ggml's, in GGUF files
ExportDtype = FloatDtype | QuantisedDtype
QUANTISED: tuple[QuantisedDtype, ...] = get_args(QuantisedDtype)
# The dtypes that the format of an engine does not have.
_MISSING_DTYPES: dict[Engine, tuple[ExportDtype, ...]] = {
    **dict.fromkeys(("vllm", "sglang", "transformers"), QUANTISED),
    "llama_cpp": ("float64",),
    "openvino": ("float64", "bfloat16", *QUANTISED),
}


@dataclass(frozen=True, kw_only=True)
class ExportConfig(RunConfig):
    """export: a drafter as serving engines load it."""

    checkpoint: AnyDrafter = free()
    """directory of an early exit, of an n-gram table, or of a draft head (EAGLE-3, DFlash, DSpark) of any trainer; also
    of a small LM or of a target, for an engine with a format of its own"""
    target: Model | None = free(None)
    """directory, GGUF file or Hub name of the drafter's target; null: for an early exit the target that its record
    names, for a table any target. Of the target of a head only config.json is read, and for llama.cpp the tokenizer. Of
    the target of a table the tokenizer is read too"""
    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit")
    reading: ReadingChanges = opt(factory=ReadingChanges, help="corrections of a draft head's config.json")
    engine: Engine = opt("vllm", "the engine that will load it")
    engine_python: Annotated[EnginePython | None, only(engine="openvino")] = free(None)
    """environment with OpenVINO, or its Python, whose optimum-cli converts the drafter; null: the environment of this
    command"""
    dtype: ExportDtype | None = None
    """dtype of the written weights (a table has none); q8_0, q5_0 and q4_0 are ggml's, of 8, 5 and 4 bits. null: the
    dtype of the head or small LM, or of an early exit's target, with two exceptions: engine=openvino has float16
    instead of bfloat16, and engine=llama_cpp has q8_0 for an early exit and for a small LM that drafts (one trained
    here, or with target=)"""
    out_dir: str = free("runs/export", "where the files go; resume=true replaces a model that is there")

    def check_fields(self) -> None:  # runs after those of the bases
        has_dtype = self.dtype not in _MISSING_DTYPES[self.engine]
        self.require("dtype", has_dtype, f"another one, which engine={self.engine} has")
