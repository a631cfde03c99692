"""What tests of fused drafts share: a model whose q is known, drafting beside n-grams."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from draft_models.ngrams.table import TrigramTable
from inference.core.stopwatch import Stopwatch
from inference.core.token_selector import TokenSelector
from inference.core.tree import DraftTree
from inference.drafters.ngram.fused import Fused
from inference.settings.method import MethodConfig, NgramConfig, StructureConfig
from inference.sizing.policy import Tuning
from tests.inference.ngram_cases import VOCABULARY, FakeSession
from tests.known_source import KnownSource, Q


class FedModel(KnownSource):
    """A `DraftModel` of a known q."""

    split, aux_layers, predicted = 0, (), None

    def begin(self, session: Any) -> None:
        self.paths = []

    def commit(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        self.paths = []


class TextSession(FakeSession):
    """As much of a session as a fused drafter looks at."""

    vocabulary = VOCABULARY

    def path(self, nodes: Sequence[int]) -> list[int]:
        return [0, *(1 + node for node in nodes)]


def fused_method(*, recycle: int = 0, longest: int = 16, strength: float = 60.0, **shape: Any) -> MethodConfig:
    ngrams = NgramConfig(evidence="mixed", depth=8, recycle=recycle, longest=longest, strength=strength)
    return MethodConfig("small_lm", StructureConfig("fused", **shape), ngrams=ngrams)


def begun(
    method: MethodConfig, q: Q, text: Sequence[int], table: TrigramTable | None = None, tuning: Tuning | None = None
) -> Fused:
    """A drafter that has read the prompt `text`."""
    fused = Fused(FedModel(q), table, method, tuning)
    fused.begin(TextSession(list(text)), TokenSelector(), Stopwatch(time.perf_counter))  # type: ignore[arg-type]
    return fused


def fused_draft(method: MethodConfig, q: Q, text: Sequence[int], limit: int = 99, **given: Any) -> DraftTree:
    """A draft after `text`, whose last token is the root, by a drafter that has just begun."""
    fused = begun(method, q, text[:-1], **given)
    return fused.draft(torch.tensor(text[-1:]), limit)
