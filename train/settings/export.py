"""Settings of export. Light on purpose: a mistake shows before torch is imported."""

from dataclasses import dataclass, field
from typing import Annotated

from draft_models.eagle3.changes import ReadingChanges
from draft_models.targets.settings import Dialect, FloatDtype, Model
from outrider.settings import Place, RunConfig, free


@dataclass(frozen=True, kw_only=True)
class ExportConfig(RunConfig):
    """export: a drafter as serving engines load it."""

    # of an early exit, of an n-gram table, or of an EAGLE-3 head, of any trainer
    checkpoint: Annotated[str, Place("the directory of a drafter, or the Hub name of an EAGLE-3 head", hub=True)] = (
        free()
    )
    # directory, GGUF file or Hub name of its target; null: the one that an early exit knows, and of a table
    # any. Of a head's only config.json is read, of a table's the tokenizer too
    target: Model | None = free(None)
    revision: str | None = free(None)  # of the target on the Hub: branch, tag or commit
    reading: ReadingChanges = field(default_factory=ReadingChanges)  # of a head: where its config.json is wrong
    dialect: Dialect = "speculators"  # of a head: whose config.json and names of tensors are written
    # of the weights that are written, a table has none; null: as a head or the target of an early exit has them
    dtype: FloatDtype | None = None
    out_dir: str = free("runs/export")  # where it goes; resume=true replaces what is there
