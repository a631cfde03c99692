"""Prompt lookup: the draft is what followed the last tokens when they occurred before, in prompt or output."""

from collections.abc import Sequence

import torch
from torch import Tensor

from inference.acceptance import Chooser
from inference.auto.policy import Tuning
from inference.drafters.interface import Drafter
from inference.drafters.registry import Maker
from inference.method_settings import CHAIN_TOKENS, MethodConfig
from inference.session import TargetSession
from inference.stopwatch import Stopwatch
from inference.tree import DraftTree, chain_parents
from outrider.streams import Streams


class PromptLookup(Drafter):
    """Needs no model, so a round costs one dictionary look-up per n-gram length.

    The longest suffix of the text, `max_ngram` tokens down to one, that occurred before gives the draft: the
    up to `max_draft` tokens after its latest earlier occurrence.
    """

    def __init__(self, max_ngram: int = 3, max_draft: int = 10):
        self.max_ngram = max_ngram
        self.max_rows = max_draft

    def begin(self, session: TargetSession, chooser: Chooser, watch: Stopwatch) -> None:
        self._text: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}  # n-gram → where its latest continuation begins
        self._append(session.tokens.tolist())

    def draft(self, root: Tensor, limit: int) -> DraftTree:
        last = int(root)
        self._note_end()  # what ends the text is followed by the root
        suffix = [*self._text[-self.max_ngram :], last]
        count = min(limit, self.max_rows)
        found: list[int] = []
        for size in range(min(self.max_ngram, len(suffix)), 0, -1):
            at = self._followed_at.get(tuple(suffix[-size:]))
            if at is not None:
                found = [*self._text[at : at + count], last][:count]
                break
        tokens = torch.tensor(found, dtype=torch.long, device=root.device)
        return DraftTree(tokens, chain_parents(0, len(found)), (-1,) * len(found))

    def commit(self, tree: DraftTree, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        self._append(tokens)

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._note_end()
            self._text.append(token)

    def _note_end(self) -> None:
        """Whatever comes next follows the n-grams that end the text now."""
        end = len(self._text)
        for size in range(1, min(self.max_ngram, end) + 1):
            self._followed_at[tuple(self._text[end - size :])] = end


class LookupMaker(Maker):
    """There is no model."""

    def make(
        self, model: None, method: MethodConfig, streams: Streams, *, drawn: bool, tuning: Tuning | None
    ) -> Drafter:
        return PromptLookup(method.max_ngram, method.stop.limit(CHAIN_TOKENS))


MAKER = LookupMaker()
