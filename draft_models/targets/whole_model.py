"""A causal LM of any architecture in transformers, run by its own forward over the rows of a draft tree.

Whether this is possible is decided by a test run (`proof.prove_rows`), not by its name.
"""

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draft_models.targets.attention import additive
from draft_models.targets.row_cache import RowCache


class WholeModel(nn.Module):
    """`model` as a `Target` that only runs as a whole."""

    layered = None
    predicted = None

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.config: PreTrainedConfig = model.config
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.dtype

    def cache(self, capacity: int) -> RowCache:
        """See `Target.cache`."""
        return RowCache(capacity)

    def rows(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: RowCache, *, last_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `Target.rows`. Hidden states are after the model's final norm if transformers reports them so."""
        out = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=additive(visible, self.dtype),
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
            **({"logits_to_keep": 1} if last_only and self._keeps_logits else {}),
        )
        return out.hidden_states[-1][0], out.logits[0, -1:] if last_only else out.logits[0]
