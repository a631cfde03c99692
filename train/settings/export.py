"""Settings of export. Light on purpose: a mistake shows before torch is imported."""

from dataclasses import dataclass
from typing import Annotated, Literal

from outrider.base.settings import RunConfig, free, only, opt
from outrider.draft_models.targets.settings import AnyDrafter, EnginePython, FloatDtype, Model, ReadingChanges

Engine = Literal["vllm", "sglang", "transformers", "llama_cpp", "openvino"]
_UNKNOWN: dict[Engine, tuple[FloatDtype, ...]] = {"llama_cpp": ("float64",), "openvino": ("float64", "bfloat16")}


@dataclass(frozen=True, kw_only=True)
class ExportConfig(RunConfig):
    """export: a drafter as serving engines load it."""

    checkpoint: AnyDrafter = free()
    """of an early exit, of an n-gram table, or of an EAGLE-3 head, of any trainer; a small LM, or a target, for engines
    with a format of their own"""
    target: Model | None = free(None)
    """directory, GGUF file or Hub name of its target; null: the one that an early exit knows, and of a table any. Of a
    head's only config.json is read, of a table's, and for llama.cpp, the tokenizer too"""
    revision: str | None = free(None, "of the target on the Hub: branch, tag or commit")
    reading: ReadingChanges = opt(factory=ReadingChanges, help="of a head: where its config.json is wrong")
    engine: Engine = opt("vllm", "the engine that will load it")
    engine_python: Annotated[EnginePython | None, only(engine="openvino")] = free(None)
    """environment of OpenVINO, or its Python; its optimum-cli converts; null: this one"""
    dtype: FloatDtype | None = None
    """dtype of the written weights (a table has none); null: that of the head, or of an early exit's target, but with
    engine=openvino float16 instead of bfloat16"""
    out_dir: str = free("runs/export", "where it goes; resume=true replaces what is there")

    def __post_init__(self) -> None:
        super().__post_init__()
        supported = self.dtype not in _UNKNOWN.get(self.engine, ())
        self.require("dtype", supported, f"another one, which engine={self.engine} has")
