"""The target drafts for itself, without some of its layers (self-speculation, Zhang et al., arXiv 2309.08168).

What is left out are whole decoder layers, as every architecture has them. The paper leaves out attention and
feed-forward parts one by one.
"""

from collections.abc import Sequence

from torch import Tensor

from inference.core.drafter import DraftModel
from inference.core.session import Session, View
from inference.drafters.shaped import ShapedMaker
from inference.settings.method import MethodConfig
from outrider.errors import UserError, require


class SkipLayersSource:
    """The target without the layers `skip`; embedding, norm, head and cache are the target's.

    A drafted token sees the keys and values that the whole target has of the text before the draft. Its own, and
    those of the draft before it, come from the layers that are left. They stand where the target's pass over the draft
    will write: that pass begins with an empty round, so nothing of the draft is left to commit.
    """

    split = 0
    taps: tuple[int, ...] = ()
    predicted = None
    hidden: Tensor

    def __init__(self, skip: Sequence[int] | None):
        self.skip = skip

    def begin(self, session: Session) -> None:
        self.session = session = session.layered()
        count = len(session.stack.layers)
        skipped = skipped_layers(self.skip, count)
        self._kept = [layer for layer in range(count) if layer not in skipped]
        self._name = f"without layers {skipped}"

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        session, stack = self.session, self.session.stack

        def kept_layers(hidden: Tensor, view: View) -> tuple[Tensor, Tensor]:
            rotary, masks = view.rotary, view.masks()
            for layer in self._kept:
                hidden = stack.run(hidden, layer, layer + 1, rotary, masks, session.rest)
            return hidden, stack.logits(hidden)

        start = session.rows
        embedded = session.feed(tokens, parents)
        hidden, logits = session.run_beside(self._name, kept_layers, embedded, start, session.rest)
        self.hidden = hidden[0]
        return logits[0]

    @property
    def target_hidden(self) -> Tensor:
        return self.session.target_hidden

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """The session commits: it has the only cache."""


def skipped_layers(skip: Sequence[int] | None, count: int) -> list[int]:
    """The layers that a draft leaves out of `count`, ascending; None: every second one between the first and the last.

    Raises `UserError` where one of them is not there, or all or none are left out.
    """
    if skip is None:
        require(count > 2, "skip", None, f"layers to leave out, as [1]: none is between the target's {count}")
        return list(range(1, count - 1, 2))
    there = all(0 <= layer < count for layer in skip) and len(set(skip)) == len(skip)
    if not there or not 0 < len(skip) < count:
        given = f"skip={list(skip)}: expected different numbers from 0 to {count - 1}, one at least and not all"
        raise UserError(f"{given}, as the target has {count} layers; null chooses every second one")
    return sorted(skip)


class SkipLayersMaker(ShapedMaker[None]):
    """There is no model but the target."""

    def require_fits(self, method: MethodConfig, layers: int) -> None:
        skipped_layers(method.skip, layers)

    def draft_model(self, model: None, method: MethodConfig) -> DraftModel:
        return SkipLayersSource(method.skip)


MAKER = SkipLayersMaker()
