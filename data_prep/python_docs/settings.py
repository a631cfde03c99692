"""Settings of write-prompts; light, so that a config error is reported at once."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Lt

from data_prep.python_docs.modules import PACKAGES
from data_prep.text.benchmarks import PromptFile
from outrider.errors import require_choice
from outrider.settings import Count, RunConfig, free, require_default


@dataclass(frozen=True, kw_only=True)
class PromptsConfig(RunConfig):
    """write-prompts: instructions about what Python and its packages document, in two files of chat prompts."""

    # your own prompts in their place, or a benchmark's by name, to be parted the same way: at least 12 are held out, or
    # half
    file: PromptFile | None = None
    packages: tuple[str, ...] = tuple(PACKAGES)  # whose documentation is read beside the standard library's
    # share of the documented objects whose prompts are kept for evaluation, chosen by a hash of each object's name
    heldout_fraction: Annotated[float, Ge(0), Lt(1)] = 0.1
    per_object: Count = 4  # prompts about one object alone, at most; more of them are comparisons of two
    quoted_chars: Annotated[int, Ge(200)] = 900  # of a documentation that is given with a prompt, at most
    out_dir: str = free("runs/prompts")  # where everything goes

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("packages", "per_object", "quoted_chars") if self.file is not None else ():
            require_default(self, name, f"file={self.file} is written")
        for name in self.packages:
            require_choice("packages", name, tuple(PACKAGES))
