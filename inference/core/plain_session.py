"""A session of a target that cannot be run layer by layer: its own forward over the rows of every round."""

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_models.targets.attention import Band
from draft_models.targets.whole_model import PlainLM, RowCache
from inference.core.rows import Rows, unpack
from inference.core.sampling import successors
from inference.core.session import TargetSession


class PlainTargetSession(TargetSession):
    """Rows are only noted as they are fed. `finish` runs all of them, so nothing of the target is there while drafting.

    Drafters that need no layers of the target see what they see of any session: tokens, and `target_hidden`.
    """

    def __init__(self, lm: PlainLM, capacity: int, context: int | None = None):
        self.stack = lm  # type: ignore[assignment]  # of which a session asks its config, device and dtype
        self.split = 0
        self.capacity = capacity
        self.context = capacity if context is None else context
        self.cache = RowCache(capacity)
        self.base = 0
        self._lm = lm
        self._start_round()

    def feed(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        """Note rows (see `TargetSession.feed`); there are no hidden states between two halves."""
        self.round.add(parents)
        self._tokens.append(tokens)
        return tokens[None]

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        """See `TargetSession.finish`."""
        self.cache.keep(self.base, ())
        self._finished = range(self.rows) if rows is None else rows
        chosen = self.round if len(self._finished) == self.rows else self.round.select(self._finished)
        tokens = self.tokens[list(self._finished)]
        parts = [self._run(chosen, tokens, start, last_only) for start in range(0, len(chosen), Band.BLOCK)]
        self._last_hidden = torch.cat([hidden for hidden, _ in parts])
        logits = parts[-1][1] if last_only else torch.cat([logits for _, logits in parts])
        if self.successors:
            self._beside_logits = [successors(logits, self.successors)[None]]
        return logits

    def _run(self, rows: Rows, tokens: Tensor, start: int, last_only: bool) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Rows start … of `rows`, as many as a mask may have at a time."""
        stop = min(start + Band.BLOCK, len(rows))
        device = tokens.device
        inside = torch.from_numpy(unpack(rows.lineages[start:stop], stop)).to(device)
        visible = torch.cat([inside.new_ones(stop - start, self.base), inside], dim=1)
        positions = self.base + torch.tensor(rows.depths[start:stop], device=device)
        return self._lm.rows(tokens[start:stop], positions, visible, self.cache, last_only=last_only)

    def commit(self, rows: Sequence[int]) -> None:
        """See `TargetSession.commit`."""
        place = {row: index for index, row in enumerate(self._finished)}
        self.cache.keep(self.base, [place[row] for row in rows])
        last = place[rows[-1]]
        self.target_hidden = self._last_hidden[last : last + 1]
        self.base += len(rows)
        self._start_round()
