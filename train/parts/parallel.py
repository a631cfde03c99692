"""Drafts of several tokens in one pass (PARD, arXiv 2504.18583): the rows that a drafter learns them from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.target import Band, Masks
from outrider.train.core.training import Student
from outrider.train.parts.on_policy import draw_depths


class DraftRows(NamedTuple):
    """Packed rows [B, T] and the masks of drafts after them: ids, positions and labels [B, N] of all.

    seen: the attention masks by window; None: the documents say them. expand: a function from values [B, T, …] of what
    the positions of the packed rows predict to those of all N. predictions: of a supervised token in expectation, by
    which the loss is divided.
    """

    ids: Tensor
    positions: Tensor
    seen: Masks | None
    labels: Tensor
    expand: Callable[[Tensor], Tensor]
    predictions: float


@dataclass(frozen=True, kw_only=True)
class DraftBand(Band):
    """The mask of packed rows that are followed by masks of drafts.

    Query i of row b sees the text from first[b, i, 0] to first[b, i, 1]: itself, or for a mask its anchor. A mask also
    sees the masks before it that have its anchor. text: the number of positions before the masks. window: of the
    layers. Blocks of masks also say where their text ends, and the first mask seen.
    """

    text: int
    window: int | None

    def block(self, begin: int, end: int, start: int, *more: int) -> Tensor:
        positions, (stop, mates) = torch.arange(end, device=self.first.device), more or (end, end)
        keys, queries = torch.cat([positions[start:stop], positions[mates:]]), positions[begin:, None]
        first, last = self.first[:, begin:end, :, None].unbind(2)
        same_draft = (keys >= self.text) & (keys <= queries) & (self.first[:, None, keys, 1] == last)
        if self.window is not None:
            same_draft &= keys > queries - self.window
        return ((keys < self.text) & (keys >= first) & (keys <= last) | same_draft)[:, None]


@dataclass(frozen=True)
class Parallel:
    """Drafting `tokens` tokens in one pass, all but the first by the id `mask`; 1: a token a pass, without masks.

    Training keeps the masks of depths 1 to j of an anchor with probability `keep` ** j (conditional drop).
    """

    tokens: int
    mask: int
    seed: int
    keep: float = 0.7  # the paper's

    @classmethod
    def of(cls, tokens: int, mask: int = 0, seed: int = 0) -> Self:
        """By the option `parallel`, which is 0 for a token a pass."""
        return cls(max(1, tokens), mask, seed)

    @property
    def predictions(self) -> float:
        """The predictions of each supervised token in expectation, those near a document's start aside."""
        return sum(self.keep**depth for depth in range(self.tokens))

    def _blocks(self, text: int, first_seen: Tensor, anchors: Tensor) -> tuple[tuple[int, ...], ...]:
        """Blocks of the masks [B, M] after `text` positions; first_seen: the first position that each sees."""
        size = Band.BLOCK // (4 if first_seen.device.type == "cpu" else 1)
        first, last = (x.tolist() for x in (first_seen.amin(0), anchors.amax(0)))
        parts = [(part, min(part + size, len(last))) for part in range(0, len(last), size)]
        return tuple((text + part, text + end, min(first[part:end]), max(last[part:end]) + 1,
                      text + max(0, part - self.tokens + 2)) for part, end in parts)  # fmt: skip

    def rows(self, student: Student, stack: LayerStack, *text: Tensor) -> DraftRows:
        """Packed rows `text` (ids, labels, positions and documents, [B, T] each) and, in training, the masks of drafts
        after them. stack: the layers that run the rows."""
        if self.tokens > 1 and student.training:  # it is judged of a token a pass
            return self.masked_rows(student.step, stack, *text)
        ids, labels, positions, _ = text
        return DraftRows(ids, positions, None, labels, lambda values: values, 1.0)

    def masked_rows(
        self, step: int, stack: LayerStack, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor
    ) -> DraftRows:
        """Packed rows [B, T] and, after them, the masks of drafts that begin at supervised positions, their anchors.

        A mask of depth j stands j positions after its anchor and predicts the label there, as a draft's token 1 + j
        does. Which masks there are is a function of seed, step and each row's content.
        """
        depths, (count, length), device = self.tokens - 1, input_ids.shape, input_ids.device
        deep = draw_depths(self.keep, self.tokens, self.seed, step, input_ids)[..., 1:]
        ahead = F.pad(documents, (0, depths), value=-2).unfold(1, self.tokens, 1)[..., 1:]
        pairs = (deep & (ahead == documents[..., None]) & (labels != IGNORE)[..., None]).flatten(1)
        counts = pairs.sum(1, keepdim=True)
        chosen = pairs.byte().argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())]
        real = torch.arange(chosen.shape[1], device=device) < counts
        anchors, depth = chosen.div(depths, rounding_mode="floor").where(real, length - 1), (chosen % depths + 1) * real
        columns = torch.arange(length, device=device).expand(count, -1)
        source, last = torch.cat([columns, anchors + depth], 1), torch.cat([columns, anchors], 1)
        seen = {}
        for window in set(stack.windows):
            text, first_seen = packed_band(documents, window), packed_band(documents).first.gather(1, anchors)
            first_seen = first_seen if window is None else torch.maximum(first_seen, anchors + depth - (window - 1))
            groups = zip(text.blocks, *(x.tensor_split(len(text.blocks)) for x in (first_seen, anchors)), strict=True)
            blocks = tuple(text_blocks + self._blocks(length, *group) for text_blocks, *group in groups)
            first = torch.stack([torch.cat([text.first, first_seen], 1), last], -1)
            seen[window] = DraftBand(first, blocks, text=length, window=window)
        ids = torch.cat([input_ids, torch.full_like(anchors, self.mask)], 1)
        all_positions = torch.cat([positions, positions.gather(1, anchors) + depth], 1)
        row_labels = labels.gather(1, source)
        row_labels[:, length:].masked_fill_(~real, IGNORE)
        rows = torch.arange(count, device=device)[:, None]
        return DraftRows(ids, all_positions, seen, row_labels, lambda values: values[rows, source], self.predictions)


ONE_A_PASS = Parallel.of(0)
