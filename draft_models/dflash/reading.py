"""The interpretation of a block drafter's tensors: everything in which writers of DFlash and DSpark files differ.

`HeadSizes` has what all draft heads have: widths, layers, vocabularies, taps (the target's layers that are read), and
windows (for each layer the number of positions it sees; None: all).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge
from transformers import PreTrainedConfig

from outrider.base.settings import Positive
from outrider.draft_models.heads.sizes import HeadSizes, sizes_for


@dataclass(frozen=True, kw_only=True)
class BlockReading(HeadSizes):
    """How the tensors of a block drafter are read. The same tensors may fit several readings.

    Raises `UserError` naming a field with an impossible value. A confidence head estimates a token's acceptance.
    """

    block: Annotated[int, Ge(2)]  # rows of a pass: the text's last token, then masks
    mask_token: Annotated[int, Ge(0)]
    sample_from_anchor: bool  # a row predicts the token after its position (DSpark); false: at its position (DFlash)
    causal: bool | None = None  # a row sees no later row of its block; null: in layers with a window
    neox: bool = True  # dimension i of a head rotates with i + D/2; false: with its neighbour
    embedding_scale: Positive = 1.0
    markov_rank: Annotated[int, Ge(0)] = 0  # of the logits' bias by the token before (DSpark); 0: none
    confidence: Literal["none", "hidden", "markov"] = "none"  # what the confidence head reads; markov: also that token

    def check_fields(self) -> None:
        self.require("mask_token", self.mask_token < self.vocabulary, f"below vocabulary={self.vocabulary}")
        self.require("confidence", self.confidence != "markov" or self.markov_rank > 0, "hidden without a Markov head")
        expected = f"{self.vocabulary} with the target's head"
        self.require("draft_vocabulary", self.own_head or self.draft_vocabulary == self.vocabulary, expected)

    @property
    def drafted(self) -> int:
        """The number of tokens that a pass drafts."""
        return self.block if self.sample_from_anchor else self.block - 1

    @property
    def spans(self) -> list[tuple[int | None, bool]]:
        """Of each layer: its window, and whether a row sees no later row of its block."""
        return [(window, window is not None if self.causal is None else self.causal) for window in self.windows]


def new_reading(
    target: PreTrainedConfig,
    *,
    taps: tuple[int, ...],
    layers: int,
    drafted: int,
    mask_token: int,
    markov_rank: int,
    draft_vocabulary: int | None,
    intermediate: int | None,
) -> BlockReading:
    """The reading of a drafter of `drafted` tokens to be trained for `target`, a config (see `sizes_for`), as vLLM
    and llama.cpp load it: DSpark, or DFlash if `markov_rank` is 0. Raises `UserError` for impossible values."""
    is_dspark = markov_rank > 0
    return BlockReading(
        **sizes_for(target, taps, layers, draft_vocabulary, intermediate),
        head_norms=True,  # queries and keys are normed per head, as in Qwen3
        block=drafted if is_dspark else drafted + 1,
        mask_token=mask_token,
        sample_from_anchor=is_dspark,
        causal=False,
        markov_rank=markov_rank,
    )
