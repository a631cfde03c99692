"""Settings of write-prompts; light, so that a config error is reported at once."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from data_prep.text.benchmarks import PromptFile
from outrider.settings import Count, RunConfig, free, require_default


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(RunConfig):
    """write-prompts: questions about what Python's standard library documents, in two files of chat prompts."""

    # your own prompts in their place, or a benchmark's by name, to be parted the same way: at least 12 are held out, or
    # half
    file: PromptFile | None = None
    # share of the documented objects whose prompts are kept for evaluation, chosen by a hash of each object's name
    heldout_fraction: Annotated[float, Ge(0), Lt(1)] = 0.1
    per_object: Count = 4  # prompts about one object at most
    out_dir: str = free("runs/prompts")  # where everything goes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.file is not None:
            require_default(self, "per_object", f"file={self.file} is written")
