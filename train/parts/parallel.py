"""Drafts of several tokens in one pass (PARD, arXiv 2504.18583): the rows that a small LM learns them from."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.draft_models.losses import IGNORE
from outrider.draft_models.targets.attention import packed_band
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.targets.target import Band
from outrider.train.parts.heldout import packed_hidden
from outrider.train.parts.on_policy import row_generator

# The states [B, N, d] that predict labels [B, N], and a function from values [B, T, …] of what the positions of packed
# rows [B, T] predict to those of all N.
Predictions = tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]


@dataclass(frozen=True, kw_only=True)
class DraftBand(Band):
    """The mask of packed rows that are followed by masks of drafts.

    Query i of row b sees the text from first[b, i] to last[b, i]: itself, or for a mask its anchor. A mask also sees
    the masks before it that have its anchor. text: the number of positions before the masks. window: of the layers.
    """

    last: Tensor
    text: int
    window: int | None

    def block(self, begin: int, end: int, start: int) -> Tensor:
        keys, queries = (torch.arange(*ends, device=self.first.device) for ends in ((start, end), (begin, end)))
        first, last = self.first[:, begin:end, None], self.last[:, begin:end, None]
        own = (keys >= self.text) & (keys <= queries[:, None]) & (self.last[:, None, start:end] == last)
        if self.window is not None:
            own &= keys > queries[:, None] - self.window
        return ((keys < self.text) & (keys >= first) & (keys <= last) | own)[:, None]


@dataclass(frozen=True)
class Parallel:
    """Drafting `tokens` tokens in one pass, all but the first by the token `mask`.

    Training keeps the masks of depths 1 to j of an anchor with probability `keep` ** j (conditional drop).
    """

    tokens: int
    mask: int
    seed: int
    keep: float = 0.7  # the paper's

    @property
    def predictions(self) -> float:
        """The predictions of each supervised token in expectation, those near a document's start aside."""
        return sum(self.keep**depth for depth in range(self.tokens))

    def predict(
        self, step: int, stack: LayerStack, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor
    ) -> Predictions:
        """Of packed rows [B, T] and, after them, the masks of drafts that begin at supervised positions, their anchors.

        A mask of depth j stands j positions after its anchor and predicts the label there, as a draft's token 1 + j
        does. Which masks there are is a function of seed, step and each row's content.
        """
        most, (count, length), device = self.tokens - 1, input_ids.shape, input_ids.device
        numbers = [torch.from_numpy(row_generator(self.seed, step, row).random(length)) for row in input_ids]
        deep = torch.stack(numbers).to(device)[..., None] < self.keep ** torch.arange(1, self.tokens, device=device)
        ahead = F.pad(documents, (0, most), value=-2).unfold(1, self.tokens, 1)[..., 1:]
        kept = (deep & (ahead == documents[..., None]) & (labels != IGNORE)[..., None]).flatten(1)
        counts = kept.sum(1, keepdim=True)
        chosen = kept.byte().argsort(dim=1, descending=True, stable=True)[:, : int(counts.max())]
        real = torch.arange(chosen.shape[1], device=device) < counts
        anchors, depth = chosen.div(most, rounding_mode="floor").where(real, length - 1), (chosen % most + 1) * real
        places = torch.arange(length, device=device).expand(count, -1)
        of, last = torch.cat([places, anchors + depth], 1), torch.cat([places, anchors], 1)
        masks = {}
        for window in set(stack.windows):
            first = packed_band(documents).first.gather(1, last)
            first = first if window is None else torch.maximum(first, of - (window - 1))
            starts = [part.flip(1).cummin(1).values.flip(1).amin(0) for part in (first[:, :length], first[:, length:])]
            blocks = Band.cut([0, length, first.shape[1]], torch.cat(starts).tolist())
            masks[window] = DraftBand(first, (blocks,), last=last, text=length, window=window)
        ids = torch.cat([input_ids, torch.full_like(anchors, self.mask)], 1)
        where = torch.cat([positions, positions.gather(1, anchors) + depth], 1)
        wanted = labels.gather(1, of)
        wanted[:, length:].masked_fill_(~real, IGNORE)
        rows = torch.arange(count, device=device)[:, None]
        return packed_hidden(stack, ids, where, documents, masks), wanted, lambda values: values[rows, of]
