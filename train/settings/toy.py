"""Settings of toy-target; a field by `free` affects no result. Light: a mistake shows before torch is imported."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from outrider.base.settings import Count, Positive, RunConfig, always, free, opt
from outrider.data_prep.text.settings import DataConfig
from outrider.train.settings.drafters import TINY_SHAPE, NotNegative, Width, require_heads
from outrider.train.settings.fit import CHECKPOINTS, FitConfig

TOY_REPORT = "toy_target.json"  # written last: a directory that has it holds a finished toy target


@dataclass(frozen=True, kw_only=True)
class ToyTargetConfig(RunConfig):
    """A small Llama trained from scratch, to learn and to test on.

    The result is an ordinary Hugging Face directory: weights, config and a byte-level BPE tokenizer.
    """

    run_files: ClassVar[tuple[str, ...]] = (CHECKPOINTS,)
    data: DataConfig
    fit: FitConfig
    out_dir: str = free("runs/toy_target", "where everything goes")
    vocabulary: Annotated[int, Ge(300)] = opt(2048, debug=320)
    """tokens, of a byte-level BPE made from the data: bytes, special tokens, merges"""
    layers: Count = opt(12, "of the Llama to train", debug=3)  # debug: in a rehearsal, on tiny models
    hidden: Count = opt(256, "width", debug=always(TINY_SHAPE["hidden"]))
    intermediate: Count = opt(704, "width inside the MLPs", debug=always(TINY_SHAPE["intermediate"]))
    heads: Count = opt(4, "of attention", debug=always(TINY_SHAPE["heads"]))
    kv_heads: Count = opt(4, "heads of keys and values", debug=always(TINY_SHAPE["kv_heads"]))
    tied: bool = opt(False, "one matrix for embedding and head")
    seq_len: Width = opt(256, "tokens of a row", debug=64)
    max_positions: Count = opt(2048, "the context that the model says it has")
    minutes: Positive | None = opt(None, debug=None)
    """the number of steps is what fits into this time here, at most `fit.steps`"""
    eval_rows: NotNegative = free(200, debug=4)
    """held-out rows of seq_len tokens that give the final bits per byte; 0: all"""

    def check_fields(self) -> None:  # runs after those of the bases
        require_heads(self.hidden, self.heads, self.kv_heads)
        self.require("max_positions", self.max_positions >= self.seq_len, f"at least seq_len ({self.seq_len})")
