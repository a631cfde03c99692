"""Settings of compare-reports."""

from dataclasses import dataclass, field
from typing import Annotated

from outrider.errors import require
from outrider.settings import Place, RunConfig, free


@dataclass(frozen=True, kw_only=True)
class CompareConfig(RunConfig):
    """compare-reports: two finished evaluations side by side, over the prompts that both have measured."""

    # the directories of two evaluations, the earlier or simpler one first: compare=[runs/a,runs/b]
    compare: list[Annotated[str, Place("the directory of an evaluation")]] = field(default_factory=list)
    # methods of the first to set beside methods of the second, as {eesd_fixed: eesd_beta}; empty: those of equal names
    pairs: dict[str, str] = field(default_factory=dict)
    seed: int = 0  # of the bootstrap
    out_dir: str = free("runs/compare")  # where compare.md and compare.json go

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.compare) == 2, "compare", self.compare, "two directories of evaluations, e.g. [runs/a,runs/b]")
