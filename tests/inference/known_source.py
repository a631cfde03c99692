"""Sources of drafts whose q is known, and what every structure promises of the trees it makes of them."""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from outrider.inference.core.tree import ROOT, DraftTree

Path_ = tuple[int, ...]
Q = Callable[[Path_], Sequence[float]]
ROOT_TOKEN = 1


class KnownSource:
    """A source whose q is a function of the path below the root; refuses rows under parents it was not fed."""

    to_probs: Any = None

    def __init__(self, q: Q):
        self.q = q
        self.paths: list[Path_] = []  # of each row
        self.calls: list[int] = []
        self.target_hidden = torch.zeros(1, 1)

    @property
    def hidden(self) -> Tensor:
        rows = torch.arange(len(self.paths))
        return rows[-self.calls[-1] :, None]

    def extend(self, tokens: Tensor, parents: Sequence[int]) -> Tensor:
        assert tokens.dtype == torch.long
        assert tokens.shape == (len(parents),)
        if not self.paths:
            assert (tokens.tolist(), tuple(parents)) == ([ROOT_TOKEN], (ROOT,))
            new: list[Path_] = [()]
        else:
            assert all(0 <= parent < len(self.paths) for parent in parents)
            new = [(*self.paths[row], token) for row, token in zip(parents, tokens.tolist(), strict=True)]
        self.paths += new
        self.calls.append(len(new))
        return torch.tensor([self.q(path) for path in new], dtype=torch.float32).log()


def root() -> Tensor:
    return torch.tensor([ROOT_TOKEN])


def random_q(seed: int, vocabulary: int = 6, sharp: float = 2.0, zeros: float = 0.0, order: int = 99) -> Q:
    """Any q: a distribution per last `order` tokens, peaked by `sharp`, each token impossible with chance `zeros`."""

    @cache
    def conditional(context: Path_) -> Sequence[float]:
        chance = random.Random(f"{seed} {context}")
        weights = [math.exp(sharp * chance.gauss(0, 1)) * (chance.random() >= zeros) for _ in range(vocabulary)]
        if not any(weights):
            weights[chance.randrange(vocabulary)] = 1.0
        return [weight / sum(weights) for weight in weights]

    return lambda path: conditional(path[-order:])


def dyadic_q(seed: int) -> Q:
    """q over three tokens full of ties and zeros, all products exact in floating point."""
    kinds = [(1, 0, 0), (0.5, 0.5, 0), (0.5, 0.25, 0.25)]

    @cache
    def conditional(path: Path_) -> Sequence[float]:
        chance = random.Random(f"{seed} {path}")
        return chance.sample(chance.choice(kinds), 3)

    return conditional


def sources_with(sharpness: list[float]) -> st.SearchStrategy[Q]:
    return st.builds(
        random_q, seed=st.integers(0, 10**6), vocabulary=st.integers(2, 7), sharp=st.sampled_from(sharpness),
        zeros=st.sampled_from([0.0, 0.5]), order=st.sampled_from([1, 2, 99]),
    )  # fmt: skip


sources = sources_with([0.0, 1.0, 3.0])
untied = sources_with([1.0, 3.0])  # tokens of one distribution have different probabilities, so ranks are unique


def paths_of(tree: DraftTree) -> list[Path_]:
    paths: list[Path_] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


def weight(q: Q, path: Path_) -> float:
    """p̂: the probability of a path under q."""
    return math.prod(q(path[:i])[path[i]] for i in range(len(path)))


def check(tree: DraftTree, source: KnownSource, limit: int) -> list[Path_]:
    """What every structure promises: returns the nodes' paths."""
    assert tree.tokens.shape == (len(tree),)
    assert tree.tokens.dtype == torch.long
    assert len(tree.rows) == len(tree)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths)  # siblings differ
    assert all(len(path) <= limit for path in paths)
    for path, row in zip(paths, tree.rows, strict=True):
        assert row == -1 or source.paths[row] == path
        assert (row != -1) == (path in source.paths)  # what was fed knows its row
    fed = [row for row in tree.rows if row >= 0]
    assert len(set(fed)) == len(fed)
    row_of = dict(enumerate(tree.rows))
    rows = len(source.paths)
    for node, parent in enumerate(tree.parents):  # the rest can be fed in index order
        if row_of[node] < 0:
            assert parent == ROOT or row_of[parent] >= 0
            row_of[node] = rows
            rows += 1
        assert parent == ROOT or row_of[parent] < row_of[node]
    if tree.path_probs is not None:
        expected = [weight(source.q, path) for path in paths]
        assert tree.path_probs.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-7)
    for parent, q in tree.q.items():
        assert q.tolist() == pytest.approx(list(source.q(paths[parent] if parent != ROOT else ())), abs=1e-6)
    return paths
