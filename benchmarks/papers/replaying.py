"""What stands in for a target whose text is known: its choices, and what one pass over that text made of it."""

import random
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outrider.draft_models.targets.target import Target, require_layers
from outrider.inference.core.cache import KVCache
from outrider.inference.core.sampling import Sampler
from outrider.inference.core.target_session import TargetSession
from outrider.inference.core.token_selector import TokenSelector
from outrider.inference.measure.replay import RecordedSelector
from outrider.inference.settings.kinds import KINDS
from outrider.inference.settings.method import MethodConfig
from outrider.inference.settings.sampling import SamplingConfig

FAITHFUL = ("early_exit", "eagle3", "small_lm", "skip_layers", "prompt_lookup", "ngrams")  # kinds that read no more


def replays(method: MethodConfig, sampling: SamplingConfig) -> bool:
    """Whether the text says all that drafts and their acceptance depend on.

    Under sampling it does where the target draws a token and goes on while that is a candidate: then the text is what
    the target drew. Candidates that are drawn themselves are verified by rejection, unless verification is naive.
    """
    shape = method.structure
    drawn = KINDS[method.source].shaped and (
        shape.kind == "chain" or (shape.kind == "k_config" and shape.draw != "top_k")
    )
    rejects = sampling.temperature > 0 and drawn and method.verify == "exact"
    known = method.source in FAITHFUL and not method.ngrams.recycle  # which reads the target's logits
    return known and not rejects and sampling.repetition_penalty in (None, 1.0)


class RecordedText(RecordedSelector):
    """Chooses what was recorded; a drafter sees the `sampler` that the text was drawn with."""

    def __init__(self, recorded: Sequence[int], sampler: Sampler | None):
        TokenSelector.__init__(self, sampler, random.Random())  # which is never asked
        self._recorded, self._place = recorded, 0


class RecordedStates(TargetSession):
    """Runs the layers that a drafter shares, and recalls the hidden states of the others, at each row's position.

    Those of a row off the text are another row's. No drafter reads them, as that row is not committed.
    """

    def __init__(self, target: Target, text: tuple[int, ...], split: int, capacity: int, context: int):
        super().__init__(require_layers(target), split, capacity, context)
        self.rest = KVCache(range(0), capacity)
        self._target, self._text = target, text

    def finish(self, rows: Sequence[int] | None = None, *, last_only: bool = False) -> Tensor:
        self.finished = range(self.rows) if rows is None else rows
        places = [min(self.base + self.round.depths[row], len(self._text) - 1) for row in self.finished]
        if self.aux_layers:
            self.extras = [states_of(self._target, self._text, self.aux_layers)[1][:, places]]
        return self.hidden.new_empty(len(places), 0)

    @property
    def target_hidden(self) -> Tensor:  # type: ignore[override]
        """Read when a drafter asks for it, which most do not."""
        last = min(self.base, len(self._text)) - 1
        return states_of(self._target, self._text, self.aux_layers)[0][last : last + 1]


class RecordedKeys(RecordedStates):
    """Recalls the keys and values of all layers too, for drafters that run some of them after the text."""

    def __init__(self, target: Target, text: tuple[int, ...], split: int, capacity: int, context: int):
        super().__init__(target, text, split, capacity, context)
        self.rest = KVCache(range(len(self.layers.layers)), capacity)

    def commit(self, rows: Sequence[int]) -> None:
        """The text's own keys and values take the place of the draft's."""
        self.base += len(rows)
        self.rest.keep(0, ())
        for layer, (keys, values) in enumerate(states_of(self._target, self._text, self.aux_layers)[2]):
            self.rest.update(keys[:, :, : self.base], values[:, :, : self.base], layer)
        self.rest.advance(self.base)
        self.start_round()


class _Read(TargetSession):
    @property
    def states(self) -> Tensor:
        """The last hidden states of the rows that ran last [n, d]."""
        return self._last_hidden


@lru_cache(maxsize=4)
@torch.inference_mode()
def states_of(
    target: Target, text: tuple[int, ...], aux_layers: tuple[int, ...]
) -> tuple[Tensor, Tensor, Sequence[tuple[Tensor, Tensor]]]:
    """Of one pass over `text`: the last hidden states [n, d], the aux ones [1, n, layers · d], the keys and values."""
    session = _Read(require_layers(target), 0, len(text))
    session.aux_layers = aux_layers
    session.prefill(text)
    aux = session.extras[0] if aux_layers else session.states[None, :, :0]
    return session.states, aux, session.content()
