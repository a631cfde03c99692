"""Drafts of several tokens in one pass (PARD, arXiv 2504.18583): the rows that a drafter learns them from.

A packed row of six tokens a … f, with `tokens` = 3, and after it the masks M of the drafts that begin at b and d:

    column     0  1  2  3  4  5  |  6  7  8  9
    id         a  b  c  d  e  f  |  M  M  M  M
    anchor     0  1  2  3  4  5  |  1  1  3  3      a query sees the text up to its anchor,
    depth                        |  1  2  1  2      and the masks of its anchor up to itself
    position   0  1  2  3  4  5  |  2  3  4  5      anchor + depth
    label      b  c  d  e  f  –  |  d  e  f  –      of the column anchor + depth

An anchor is the last text token before a draft; the depth of a mask is its distance from the anchor. Of the masks that
could follow each position, training draws some. A `Band` is a mask of attention that is made block by block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.open_target import special_tokens
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.target import Band, Masks, QueryBlock, RowBlocks
from outrider.train.core.training import Student
from outrider.train.parts.on_policy import draw_depths
from outrider.train.parts.position_weights import Slots
from outrider.train.settings.drafters import PositionWeights


def unused_token(tokenizer: PreTrainedTokenizerBase, vocab: int) -> int:
    """A token id that no text has: of the target's `vocab` ids the first beyond the tokenizer's, else the last added
    token that is neither special nor in the chat template; `vocab` if there is none."""
    special_ids, template = {*special_tokens(tokenizer).values()}, str(tokenizer.chat_template)
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.content not in template]
    next_id = 1 + max(tokenizer.get_vocab().values())  # ids may have gaps
    return next_id if next_id < vocab else max((i for i in added if i < vocab and i not in special_ids), default=vocab)


class DraftRows(NamedTuple):
    """Packed rows [B, T] and the mask tokens of drafts after them: ids, positions and labels [B, N] of all.

    masks: of attention, by window; None: attention within each document. expand: a function from values [B, T, …] of
    what the positions of the packed rows predict to the values [B, N, …] of what all N positions predict.
    expected_predictions: the expected number of predictions of a supervised token, by which the loss is divided.
    slots: which slot of which draft each position is, if the loss weighs predictions by slots.
    """

    ids: Tensor
    positions: Tensor
    masks: Masks | None
    labels: Tensor
    expand: Callable[[Tensor], Tensor]
    expected_predictions: float
    slots: Slots | None = None


@dataclass(frozen=True, kw_only=True)
class DraftBand(Band):
    """The mask of packed rows that are followed by masks of drafts.

    first_keys [B, T + M, 2]: query i of row b sees the text from first_keys[b, i, 0] to [b, i, 1], i itself or a
    mask's anchor. A mask also sees the masks before it that have its anchor. text_length: T, the positions before the
    masks. window: of the layers; None: no window. The second range of keys of a `QueryBlock` has masks.
    """

    text_length: int
    window: int | None

    def block(self, block: QueryBlock) -> Tensor:
        """The mask of a block of queries, bool [B, 1, Q, K]; True = attend."""
        columns = torch.arange(block.end, device=self.first_keys.device)
        keys = torch.cat([columns[block.first_key : block.key_end], columns[block.second_key :]])  # [K]
        queries = columns[block.begin :, None]  # [Q, 1]
        starts, anchors = self.first_keys[:, block.begin : block.end, :, None].unbind(2)  # [B, Q, 1] each
        same_draft = (keys >= self.text_length) & (keys <= queries) & (self.first_keys[:, None, keys, 1] == anchors)
        if self.window is not None:
            same_draft &= keys > queries - self.window
        return ((keys < self.text_length) & (keys >= starts) & (keys <= anchors) | same_draft)[:, None]  # [B, 1, Q, K]


@dataclass(frozen=True)
class Parallel:
    """Drafting `tokens` tokens in one pass, all but the first by the id `mask`; 1: a token a pass, without masks.

    Training keeps the masks of depths 1 to j of an anchor with probability `keep` ** j (conditional drop).
    """

    tokens: int
    mask: int = 0
    seed: int = 0
    weights: PositionWeights = "none"  # of the predictions (see `position_weights`)
    keep: float = 0.7  # the paper's

    @property
    def expected_predictions(self) -> float:
        """The predictions of each supervised token in expectation, those near a document's start aside."""
        return sum(self.keep**depth for depth in range(self.tokens))

    def add_masks(self, student: Student, running_stack: LayerStack, *packed_rows: Tensor) -> DraftRows:
        """Packed rows (ids, labels, positions and documents, [B, T] each) and, in training, the masks of drafts after
        them. running_stack: the layers that run the rows."""
        if self.tokens > 1 and student.training:  # evaluations judge drafts of one token a pass
            return self.append_masks(student.step, running_stack, *packed_rows)
        ids, labels, positions, _ = packed_rows
        return DraftRows(ids, positions, None, labels, expand=lambda values: values, expected_predictions=1.0)

    def append_masks(
        self, step: int, stack: LayerStack, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor
    ) -> DraftRows:
        """Packed rows [B, T] and, after them, the masks of drafts that begin at supervised positions, their anchors.

        A mask of depth j stands j positions after its anchor and predicts the label there, as a draft's token 1 + j
        does. Which masks there are is a function of seed, step and each row's content.
        """
        (batch_size, text_length), device = input_ids.shape, input_ids.device
        anchors, depths, is_mask = self._draw_masks(step, input_ids, labels, documents)  # [B, M] each
        columns = torch.arange(text_length, device=device).expand(batch_size, -1)  # [B, T]
        predicted_columns = torch.cat([columns, anchors + depths], 1)  # [B, T + M]
        last_seen = torch.cat([columns, anchors], 1)  # [B, T + M]
        band_by_window = {
            window: self._draft_band(documents, anchors, depths, last_seen, window) for window in set(stack.windows)
        }
        ids = torch.cat([input_ids, torch.full_like(anchors, self.mask)], 1)
        all_positions = torch.cat([positions, positions.gather(1, anchors) + depths], 1)
        row_labels = labels.gather(1, predicted_columns)
        row_labels[:, text_length:].masked_fill_(~is_mask, IGNORE)
        row_index, slots = torch.arange(batch_size, device=device)[:, None], None
        if self.weights != "none":
            slot_index = torch.cat([torch.zeros_like(columns), depths], 1)  # [B, T + M]
            slots = Slots(self.weights, row_index * text_length + last_seen, slot_index, self.tokens, input_ids.shape)

        def expand(values: Tensor) -> Tensor:
            return values[row_index, predicted_columns]

        return DraftRows(ids, all_positions, band_by_window, row_labels, expand, self.expected_predictions, slots)

    def _draw_masks(self, step: int, input_ids: Tensor, labels: Tensor, documents: Tensor) -> tuple[Tensor, ...]:
        """Three tensors [B, M]: every mask's anchor, its depth and whether it exists; M: the most masks of a row."""
        depth_count, text_length = self.tokens - 1, input_ids.shape[1]
        is_kept = draw_depths(self.keep, self.tokens, self.seed, step, input_ids)[..., 1:]  # [B, T, depths]
        later_documents = F.pad(documents, (0, depth_count), value=-2).unfold(1, self.tokens, 1)[..., 1:]  # −2: none
        is_in_document = later_documents == documents[..., None]
        has_mask = (is_kept & is_in_document & (labels != IGNORE)[..., None]).flatten(1)  # [B, T · depths]
        mask_counts = has_mask.sum(1, keepdim=True)
        indices = has_mask.byte().argsort(dim=1, descending=True, stable=True)[:, : int(mask_counts.max())]  # [B, M]
        is_mask = torch.arange(indices.shape[1], device=input_ids.device) < mask_counts
        anchors = indices.div(depth_count, rounding_mode="floor").where(is_mask, text_length - 1)  # else the last
        return anchors, (indices % depth_count + 1) * is_mask, is_mask

    def _draft_band(
        self, documents: Tensor, anchors: Tensor, depths: Tensor, last_seen: Tensor, window: int | None
    ) -> DraftBand:
        """The mask of attention in layers with `window`. last_seen [B, T + M]: the last text column that each sees."""
        text_band, first_seen = packed_band(documents, window), packed_band(documents).first_keys.gather(1, anchors)
        if window is not None:
            first_seen = torch.maximum(first_seen, anchors + depths - (window - 1))
        parts = len(text_band.blocks)  # one for each row, or one for all rows
        groups = zip(text_band.blocks, first_seen.tensor_split(parts), anchors.tensor_split(parts), strict=True)
        text_length = documents.shape[1]
        blocks = tuple(text_blocks + self._mask_blocks(text_length, *group) for text_blocks, *group in groups)
        visible_range = torch.stack([torch.cat([text_band.first_keys, first_seen], 1), last_seen], -1)
        return DraftBand(visible_range, blocks, text_length=text_length, window=window)

    def _mask_blocks(self, text_length: int, first_seen: Tensor, anchors: Tensor) -> RowBlocks:
        """Blocks of the masks [B, M] after the text; first_seen [B, M]: the first position that each sees."""
        block_size = Band.BLOCK // (4 if first_seen.device.type == "cpu" else 1)  # smaller blocks skip more keys
        first_keys, last_keys = first_seen.amin(0).tolist(), anchors.amax(0).tolist()
        blocks = []
        for begin in range(0, len(last_keys), block_size):
            end = min(begin + block_size, len(last_keys))
            first_mask_key = text_length + max(0, begin - self.tokens + 2)  # a draft has at most tokens − 1 masks
            text_range = min(first_keys[begin:end]), max(last_keys[begin:end]) + 1
            blocks.append(QueryBlock(text_length + begin, text_length + end, *text_range, first_mask_key))
        return tuple(blocks)


ONE_A_PASS = Parallel(tokens=1)
