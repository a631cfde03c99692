"""One sequence inside a target: its caches, split at a layer, and the rows of the current round."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draft_models.target import LayerStack
from inference.cache import KVCache
from inference.tree import chain_parents


class TargetSession:
    """Runs the target over one sequence in two halves, layers [0, split) and [split, L).

    A drafter that lives on the target's first layers feeds rows through the first half while it drafts;
    `finish` then runs only the second half over all rows, so no layer ever computes a row twice. Any other
    drafter uses split = 0, where the first half is the embedding.

    A *row* is a token of the current round: row 0 is the last committed token, the others are draft tokens
    under it. `base` counts the committed positions before row 0; all caches hold exactly those between
    rounds. `target_hidden` [1, d] is the hidden state after the last layer at the last committed position.
    `capacity` counts the slots of the caches, `context` (by default as many) the positions the text may reach.
    """

    target_hidden: Tensor

    def __init__(self, stack: LayerStack, split: int, capacity: int, context: int | None = None):
        self.stack = stack
        self.split = split
        self.capacity = capacity
        self.context = capacity if context is None else context
        self.first = KVCache(range(split), capacity)
        self.rest = KVCache(range(split, len(stack.layers)), capacity)
        self.base = 0
        self._places = torch.arange(capacity, device=stack.device)
        stack.reserve(capacity)
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._tokens: list[Tensor] = []
        self._hidden: list[Tensor] = []
        self._finished: list[int] = []  # the rows that have been through the second half
        self._is_chain = True

    @property
    def rows(self) -> int:
        """Rows of this round that have been through the first half."""
        return len(self.parents)

    @property
    def hidden(self) -> Tensor:
        """The rows' hidden states between the halves [1, rows, d]."""
        if len(self._hidden) > 1:
            self._hidden = [torch.cat(self._hidden, dim=1)]
        return self._hidden[0]

    @property
    def tokens(self) -> Tensor:
        """The rows' tokens [rows]."""
        return torch.cat(self._tokens)

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Add rows: tokens [n] whose parents are row numbers (−1: no parent in this round), through the first half.

        Returns their hidden states [1, n, d].
        """
        start = self.rows
        self._is_chain = self._is_chain and tuple(parents) == chain_parents(start, len(parents))
        for parent in parents:
            self.parents.append(parent)
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        positions = self.positions(start, self.rows)
        hidden = self.stack.embed(tokens[None], positions)
        if self.split:
            masks = self.masks(start, self.rows)
            hidden = self.stack.run(hidden, 0, self.split, self.stack.rotary(positions), masks, self.first)
        self.first.advance(len(parents))
        self._hidden.append(hidden)
        self._tokens.append(tokens)
        return hidden

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        """Run the second half over `rows` (ascending, with all their ancestors; None: every row).

        Returns next-token logits of each of them [n, V], or of the last one [1, V]. Rows left out stay out of
        the second half, and cannot be committed.
        """
        self._finished = list(range(self.rows)) if rows is None else list(rows)
        everything = len(self._finished) == self.rows
        hidden = self.hidden if everything else self.hidden[:, self._finished]
        masks, rotary = self.masks(0, self.rows), self.rotary(0, self.rows)
        if not everything:
            masks, rotary = self._selected(masks, rotary)
        hidden = self.stack.run(hidden, self.split, len(self.stack.layers), rotary, masks, self.rest)
        self.rest.advance(len(self._finished))
        self._last_hidden = hidden[0]
        return self.stack.logits(hidden[:, -1:] if last_only else hidden)[0]

    def commit(self, rows: Sequence[int]) -> None:
        """End the round: the tokens of `rows`, an ascending path from row 0, are part of the text; drop the others."""
        self.first.keep(self.base, rows)
        if self.rest.layers:
            place = {row: index for index, row in enumerate(self._finished)}
            self.rest.keep(self.base, [place[row] for row in rows])
            last = place[rows[-1]]
            self.target_hidden = self._last_hidden[last : last + 1]
        self.base += len(rows)
        self.parents, self.depths, self._is_chain = [], [], True
        self._tokens, self._hidden, self._finished = [], [], []

    def positions(self, start: int, stop: int) -> Tensor:
        """Positions [1, stop − start] of rows start..stop−1; a negative start reaches into the committed ones."""
        if self._is_chain or stop <= 1:
            return self._places[None, self.base + start : self.base + stop]
        depths = torch.tensor(self.depths[start:stop], device=self._places.device)
        return (self.base + depths)[None]

    def rotary(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin of rows start..stop−1, as `positions`."""
        return self.stack.rotary(self.positions(start, stop))

    def masks(self, start: int, stop: int) -> dict[int | None, Tensor | None]:
        """Additive masks [1, 1, queries, base + stop] for rows start..stop−1, by window size of the layers.

        A row sees every committed position and its own ancestors. None where attention needs no mask: one
        query, or causal attention over an empty cache. A negative start reaches into the committed positions.
        """
        past, keys = self.base + start, self.base + stop
        trivial = self._is_chain and (stop - start == 1 or past == 0)
        built: dict[int | None, Tensor | None] = {}
        for window in set(self.stack.windows):
            binding = window if window is not None and window < keys else None
            if binding not in built:
                built[binding] = None if trivial and binding is None else self._mask(past, keys, binding)
            built[window] = built[binding]
        return built

    def _selected(
        self, masks: dict[int | None, Tensor | None], rotary: tuple[Tensor, Tensor]
    ) -> tuple[dict[int | None, Tensor | None], tuple[Tensor, Tensor]]:
        """The masks and rotary tables of all rows, cut down to the finished ones."""
        rows = torch.tensor(self._finished, device=self.stack.device)
        columns = torch.cat([self._places[: self.base], self.base + rows])
        cut = {w: None if m is None else m[:, :, rows[:, None], columns] for w, m in masks.items()}
        return cut, (rotary[0][:, rows], rotary[1][:, rows])

    def _mask(self, past: int, keys: int, window: int | None) -> Tensor:
        device, dtype = self.stack.device, self.stack.dtype
        lowest = torch.finfo(dtype).min
        mask = torch.zeros(keys - past, keys, dtype=dtype, device=device)
        columns = self._places[:keys]
        if self._is_chain:
            mask.masked_fill_(columns > columns[past:, None], lowest)
        else:
            closure = ancestors(self.parents)[past - self.base : keys - self.base, : keys - self.base]
            mask[:, self.base :].masked_fill_(~closure.to(device), lowest)
        if window is not None:
            if not self._is_chain:
                depths = torch.tensor(self.depths[: keys - self.base], device=device)
                columns = torch.cat([columns[: self.base], self.base + depths])
            mask.masked_fill_(columns <= columns[past:, None] - window, lowest)
        return mask[None, None]


def ancestors(parents: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """bool [n, n]: entry (i, j) says that j is i or an ancestor of i: the transitive closure of `parents`."""
    lineages: list[int] = []  # of each node as bits: a round builds several of these, and tensor steps cost more
    for node, parent in enumerate(parents):
        lineages.append((lineages[parent] if parent >= 0 else 0) | 1 << node)
    count, width = len(lineages), -(-len(lineages) // 8)
    packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in lineages), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(count, width), axis=1, count=count, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_)).to(device)
