"""Settings of refit; a field by `free` affects no result. Light: a mistake shows before torch is imported."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt, Lt

from outrider.base.settings import Positive, RunConfig, Seed, free, opt
from outrider.data_prep.text.settings import ChatTemplate, RecordFile
from outrider.draft_models.targets.settings import ONE_OR_MORE, DrafterFolder, TargetOrTokenizer

_LOG = "a log of outrider serve, or another file or directory of conversations with answers"
_Log = Annotated[str, RecordFile(_LOG, holds=("*.jsonl", "*.json", "*.parquet"))]
Logs = Annotated[tuple[_Log, ...], ONE_OR_MORE]


@dataclass(frozen=True, kw_only=True)
class RefitConfig(TargetOrTokenizer, RunConfig):
    """refit: continue a drafter on recent traffic, and keep the new version if it drafts better there."""

    checkpoint: DrafterFolder | None = opt(None, "directory of an early exit, small LM, EAGLE-3 head or n-gram table")
    logs: Logs = opt((), "files or directories of logged answers: logs=traffic.jsonl or logs=[a.jsonl,b.jsonl]")
    template: ChatTemplate | None = None
    """of conversations; null: that of the drafter's training, or the tokenizer's"""
    heldout_share: Annotated[float, Gt(0), Lt(1)] = 0.2
    """newest share of the conversations, by first turn, on which the old and the new drafter are compared"""
    minutes: Positive | None = opt(30.0, "of the training; null: all its steps. A table is always counted whole")
    training: dict[str, object] = opt(factory=dict, help="options of the training, as training.fit.lr=1e-4")
    seed: Seed = opt(0, "of the interval's draws")
    back: bool = free(False, "return to the version before the current one of out_dir")
    out_dir: str = free("runs/refit", "the versions, and the link `current` to the drafter in use")

    def check_fields(self) -> None:  # runs after those of the bases
        for name in () if self.back else ("checkpoint", "logs"):
            self.require(name, bool(getattr(self, name)), "what is continued, on which traffic; or back=true")
