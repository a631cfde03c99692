"""Self-speculation: the target without some of its layers is the drafter (Zhang et al., arXiv 2309.08168).

Whole decoder layers are skipped, which works for every architecture. The paper skips attention and feed-forward parts
separately.
"""

from collections.abc import Sequence

from torch import Tensor

from outrider.base.errors import UserError, require
from outrider.inference.core.drafter import DraftModel
from outrider.inference.core.session import Session, View
from outrider.inference.drafters.draft_model import BesideTarget
from outrider.inference.drafters.model_plugin import ModelDrafterPlugin
from outrider.inference.settings.method import MethodConfig


class SkipLayersDraftModel(BesideTarget):
    """The target without the layers `skip`; embedding, norm, head and cache are the target's.

    A drafted token sees the whole target's keys and values of the text before the draft. The draft's keys and values
    come from the remaining layers. The target's pass over the draft overwrites their slots, so none is committed.
    """

    predicted = None

    def __init__(self, skip: Sequence[int] | None):
        self.skip = skip

    def begin(self, session: Session) -> None:
        self.target_session = self.session = session = session.require_layers()  # the only session
        layer_count = len(session.stack.layers)
        skipped = skipped_layers(self.skip, layer_count)
        self._layers = [layer for layer in range(layer_count) if layer not in skipped]
        self._name = f"without layers {skipped}"

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        session, stack = self.session, self.session.stack

        def kept_layers(hidden: Tensor, view: View) -> tuple[Tensor, Tensor]:
            rotary, masks = view.rotary, view.masks()
            for layer_index in self._layers:
                hidden = stack.run(hidden, layer_index, layer_index + 1, rotary, masks, view.cache)
            return hidden, stack.logits(hidden)

        first_row = session.rows
        embedded = session.feed(tokens, parents)
        # With `split` 0 a session's `feed` only embeds tokens. The second cache is the one of all layers.
        hidden, logits = session.run_draft_layers(self._name, kept_layers, embedded, first_row, session.second_cache)
        self.hidden = hidden[0]
        return logits[0]

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Nothing to do: the session has the only cache, and commits it."""


def skipped_layers(skip: Sequence[int] | None, n_layers: int) -> list[int]:
    """The layers of `n_layers` that drafts skip, ascending; None: every second one between the first and the last.

    Raises `UserError` if one of them does not exist, or if all or none are skipped.
    """
    if skip is None:
        expected = f"layers to leave out, as [1]: none is between the target's {n_layers}"
        require(n_layers > 2, "skip", setting=None, expected=expected)
        return list(range(1, n_layers - 1, 2))
    are_valid = all(0 <= layer < n_layers for layer in skip) and len(set(skip)) == len(skip)
    if not are_valid or not 0 < len(skip) < n_layers:
        problem = f"skip={list(skip)}: expected different numbers from 0 to {n_layers - 1}, one at least and not all"
        raise UserError(f"{problem}, as the target has {n_layers} layers; null chooses every second one")
    return sorted(skip)


class SkipLayersPlugin(ModelDrafterPlugin[None]):
    """There is no model except the target."""

    def require_fits(self, method: MethodConfig, layer_count: int) -> None:
        skipped_layers(method.skip, layer_count)

    def draft_model(self, model: None, method: MethodConfig) -> DraftModel:
        return SkipLayersDraftModel(method.skip)
