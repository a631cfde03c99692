"""What tests of n-gram drafters share: a table of random text, a text to draft after, and the paths of a draft."""

from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.core.sampling import top_tokens
from outrider.inference.core.tree import DraftTree
from outrider.inference.drafters.ngrams.drafter import MixedDrafter, TrigramDrafter
from outrider.inference.settings.method import NgramConfig

VOCABULARY = 12
TEXTS = st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=40)  # one id beyond the table


class FakeSession:
    """recycle: of the rows of a round, the probabilities [m, V] after each, for drafters that read them."""

    def __init__(self, tokens: list[int], recycle: dict[int, list[float]] | None = None):
        self.tokens = torch.tensor(tokens, dtype=torch.long)
        self.rows = recycle or {}

    def top_tokens_of_rows(self) -> tuple[list[int], torch.Tensor]:
        return list(self.rows), top_tokens(torch.tensor(list(self.rows.values())).log(), 4)


@cache
def make_documents(vocabulary: int = VOCABULARY) -> list[list[int]]:
    generator = np.random.default_rng(3)
    steps = generator.dirichlet(np.full(vocabulary, 0.3), vocabulary)
    documents = []
    for _ in range(20):
        document = [0]
        for _ in range(60):
            document.append(int(generator.choice(vocabulary, p=steps[document[-1]])))
        documents.append(document)
    return documents


def make_table(
    vocabulary: int = VOCABULARY, orders: tuple[int, ...] = (2, 3, 4), suffixes: bool = False
) -> TrigramTable:
    documents = make_documents(vocabulary)
    return TrigramTable.from_documents(documents, list(orders), vocabulary, "t", min_count=2, suffixes=suffixes)


TABLE = make_table()
CONFIGS = {
    "puct": NgramConfig(search="puct", iterations=40),
    "best_first": NgramConfig(depth=6, nodes=20),
    "not adapted": NgramConfig(adapt=False, order=2),
    "mixed": NgramConfig(evidence="mixed", depth=8, nodes=30),
    "best_first, auto": NgramConfig(depth=6, nodes="auto"),
    "mixed, auto": NgramConfig(evidence="mixed", depth=8, nodes="auto"),
}


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The path of tokens to each node; checks that it is a tree."""
    paths: list[tuple[int, ...]] = []
    for node, (token, parent) in enumerate(zip(tree.tokens.tolist(), tree.parents, strict=True)):
        assert -1 <= parent < node
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    assert len(set(paths)) == len(paths)
    return paths


def draft(drafter: TrigramDrafter | MixedDrafter, text: list[int], limit: int = 100) -> DraftTree:
    """A draft after `text`, whose last id is the root."""
    drafter.begin(FakeSession(text[:-1]), None, None)
    return drafter.draft(torch.tensor(text[-1:]), limit)
