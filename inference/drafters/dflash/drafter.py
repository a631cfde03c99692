"""A block drafter, DFlash or DSpark, as the drafter: all tokens of a draft come from one pass over a block.

A block is the root, which is the text's last token, and mask tokens. It attends to features of the text, which are
made of aux hidden states: those of the target at chosen boundaries of its layers (`taps`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.draft_models.calibration import META_FILE
from outrider.draft_models.dflash import checkpoint
from outrider.draft_models.dflash.dialects import is_block_drafter, local_name
from outrider.draft_models.dflash.model import DFlash
from outrider.draft_models.targets.attention import additive_mask
from outrider.draft_models.targets.open_target import OpenTarget
from outrider.draft_models.targets.target import Mask, TextMasks
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.session import Session, View
from outrider.inference.core.tree import chain_parents
from outrider.inference.drafters.dflash import KIND
from outrider.inference.drafters.draft_model import BesideTarget, OnePass
from outrider.inference.drafters.head_plugin import HeadPlugin
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.drafters.plugin import Methods, ModelOptions
from outrider.inference.settings.method import MethodConfig


def block_mask(chain_mask: Mask, positions: Tensor, window: int | None, causal: bool) -> Mask:
    """The mask of a layer for a block at `positions` [1, n], whose slots in the cache are its positions.

    chain_mask: what the session would give a chain, of the same shape; None: of a single row. Padding rows of a pass of
    fixed shape stand at the first position, so the largest position is that of the block's last row. window: positions
    that a row sees; causal: a row sees no later row of the block.
    """
    if isinstance(chain_mask, TextMasks):
        text_blocks = zip(chain_mask.masks, positions.split(chain_mask.rows, dim=1), strict=True)
        return replace(chain_mask, masks=tuple(block_mask(*text_block, window, causal) for text_block in text_blocks))
    if not isinstance(chain_mask, Tensor):
        return chain_mask
    row_positions = positions[0, :, None]  # [n, 1]
    key_positions = torch.arange(chain_mask.shape[-1], device=chain_mask.device)  # [keys]
    visible = key_positions <= (row_positions if causal else row_positions.max())  # [n or 1, keys]
    if window is not None:
        visible = visible & ((key_positions - row_positions).abs() < window)
    return additive_mask(visible.expand(len(row_positions), -1), chain_mask.dtype)


class BlockPasses(BesideTarget):
    """The passes of a block drafter, in its own session next to the target's.

    The cache holds the context: entry t is the feature of position t. Features of newly accepted positions are pending
    until the next draft, whose first pass stores them. The second pass runs the block, and its entries are dropped.
    """

    def __init__(self, drafter: DFlash):
        self.drafter = drafter
        self.aux_layers = drafter.reading.taps  # reading: how the model runs, as its files say
        self.predicted = drafter.draft_tokens

    def begin(self, session: Session) -> None:
        self.target_session = session
        self.session = session.require_layers().draft_layers_session(self.drafter)
        self._aux_hidden = session.aux_hidden(range(len(session.tokens)))  # [1, n, taps · d] of pending positions
        self._store_context()

    def _store_context(self) -> None:
        """Store the features of the pending positions."""
        drafter, pending_count = self.drafter, self._aux_hidden.shape[1]
        if not pending_count:
            return

        def context_pass(aux: Tensor, view: View) -> tuple[Tensor]:
            features = drafter.features(aux)
            drafter.store_context(features, view.rotary, view.cache)
            return (features,)

        self.session.run_rows("context", context_pass, self._aux_hidden, chain_parents(0, pending_count))
        self.session.commit(range(pending_count))
        self._aux_hidden = self._aux_hidden[:, :0]

    def run_pass(self, tokens: Tensor) -> Tensor:
        """Run a block, root and masks [n]; returns the logits of the rows that draft [n or n − 1, draft vocabulary]."""
        self._store_context()
        drafter, reading = self.drafter, self.drafter.reading

        def block_pass(tokens: Tensor, view: View) -> tuple[Tensor, Tensor]:
            # The mask of any window: `block_mask` takes only its shape, dtype and device.
            chain_mask, spans = view.masks()[reading.windows[0]], reading.spans  # (window, causal) of each layer
            mask_by_span = {span: block_mask(chain_mask, view.positions, *span) for span in {*spans}}
            layer_masks = [mask_by_span[span] for span in spans]
            hidden = drafter.run(drafter.embed(tokens[None]), layer_masks, view.rotary, view.cache)
            return hidden, drafter.draft_logits(hidden)

        hidden, logits = self.session.run_rows("block", block_pass, tokens, chain_parents(0, len(tokens)))
        self.session.first_cache.keep(self.session.base, ())
        self.session.start_round()  # the block is dropped, as its entries in the cache were in the line before
        first_row = 0 if reading.sample_from_anchor else 1  # the root's row drafts, too, or only masks' rows
        self.hidden = hidden[0, first_row:]
        return logits[0, first_row:]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        return self.run_pass(tokens)

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        self._aux_hidden = torch.cat([self._aux_hidden, self.target_session.aux_hidden(rows)], dim=1)


class OneBlock(OnePass):
    """The draft model of DFlash and DSpark.

    A pass runs the whole block, as in training, also if fewer tokens are drafted. DSpark's Markov head biases logits by
    the token before them, so that siblings have different children.
    """

    def __init__(self, drafter: DFlash):
        super().__init__(BlockPasses(drafter), drafter.reading.mask_token, drafter.reading.drafted)
        self.drafter = drafter

    @property
    def pass_rows(self) -> int:
        return self.drafter.reading.block

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        logits = super().extend(tokens, parents)
        self.hidden = self.drafter.evidence(self.hidden, tokens)  # what a confidence head reads
        return self.drafter.bias(logits, tokens)


class DFlashPlugin(HeadPlugin[DFlash]):
    """The model is a `DFlash`."""

    kind, record, local_name = KIND, checkpoint.TRAINING_FILE, local_name

    def open_head(self, where: str, target: PreTrainedConfig) -> checkpoint.StoredBlock:
        return checkpoint.open_drafter(where, target, self.changes)

    def is_in(self, folder: str) -> bool:
        return is_block_drafter(open_tensors(folder).file_of)  # its config may name a causal LM

    def load(self, where: str, target: OpenTarget, methods: Methods, **options: Unpack[ModelOptions]) -> DFlash:
        """Without a calibration head, rules that ask for one ask DSpark's confidence head."""
        if self.asks_head(methods) and not (Path(where) / str(KIND.calibration) / META_FILE).is_file():
            drafter = self.load_drafter(where, target, **options)
            if drafter.confidence_head is not None:
                return cast("DFlash", Calibrated(drafter, drafter.confidence_head))
        return super().load(where, target, methods, **options)

    def vllm_method(self, where: str, target: OpenTarget) -> str | None:
        return checkpoint.vllm_method(self.open_head(where, target.config).reading)

    def export(self, where: str, target: OpenTarget, dtype: torch.dtype, folder: Path) -> None:
        stored = self.open_head(where, target.config)
        made_here = stored.made_here and not self.changes.overrides  # trained by Outrider
        checkpoint.require_vllm(stored.reading)
        checkpoint.save_drafter(folder, stored.load(dtype), target.config, made_here=made_here)

    def draft_model(self, model: DFlash, method: MethodConfig) -> DraftModel:
        return OneBlock(model)
