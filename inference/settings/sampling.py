"""Settings of token selection from logits; they do not import torch, so that mistakes are reported quickly."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from outrider.base.settings import Settings, Share, opt


@dataclass(frozen=True)
class SamplingConfig(Settings):
    """The conversion of logits to probabilities, for target and drafter alike (see inference/core/sampling.py)."""

    temperature: Annotated[float, Ge(0), Le(1e6)] = 0.0
    """0: greedy; top_k, top_p and min_p then have nothing to choose from"""
    top_k: Annotated[int, Ge(0), Lt(2**31)] = opt(0, "keep the k likeliest tokens; 0: all")
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """keep the likeliest tokens that together have this probability; 1: all"""
    min_p: Share = opt(0.0, "keep tokens at least this fraction as likely as the likeliest; 0: all")
    repetition_penalty: Annotated[float, Ge(1e-3), Le(1e3)] | None = None
    """divides positive logits of tokens in the text so far (prompt too); 1: none; null: the target's own where its
    generation config is taken over, else none"""

    def check_fields(self) -> None:
        is_valid = self.temperature == 0 or self.temperature >= 1e-6  # below, logits overflow float32
        self.require("temperature", is_valid, "0 (greedy) or a number ≥ 1e-6")


GREEDY = SamplingConfig()
Verification = Literal["exact", "block", "naive"]  # see `MethodConfig.verify`
