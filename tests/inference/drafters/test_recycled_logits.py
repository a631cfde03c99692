"""Recycled logits: what is kept of the target's rows, as evidence of the mixture, and where it comes from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_models.ngrams.overlay import longer_key, new_recycled, place_of, recycle
from draft_models.targets.open_target import open_target
from draft_models.targets.stack import WholeModel
from inference.core.decode import speculative
from inference.core.target_session import Runtime
from inference.core.tree import DraftTree
from inference.drafters.ngram.ngrams import MixedDrafter
from inference.engines.graphs.cuda_graphs import Graphed
from inference.loading.targets import load_plain
from inference.settings.method import NgramConfig
from tests.graph_contract import keep_contracts
from tests.inference.ngram_cases import TABLE
from tests.tiny import open_stack, random_prompt, save_target

CPU, WIDTH = torch.device("cpu"), 3


def kept(recycled: Any, context: tuple[int, ...]) -> tuple[list[int], list[float], int] | None:
    """(tokens, probabilities, rows seen) under a context, None where there are none."""
    key = np.uint64(0)
    for token in reversed(context):
        key = np.uint64(longer_key(key, token))
    place = place_of(recycled, key)
    if not recycled.seen[place] or recycled.keys[place] != key:
        return None
    return recycled.tokens[place].tolist(), recycled.probs[place].tolist(), int(recycled.seen[place])


@settings(deadline=None, max_examples=25)
@given(
    text=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    parents=st.lists(st.integers(-1, 20), max_size=12),
    seed=st.integers(0, 99),
)
def test_every_row_is_kept_under_what_it_followed(text: list[int], parents: list[int], seed: int) -> None:
    """Under its last token and its last two; the newest of equal contexts; none of a row that is no numbers."""
    parents = [min(parent, i - 1) for i, parent in enumerate(parents)]
    generator = np.random.default_rng(seed)
    nodes = generator.integers(0, 10, len(parents))
    rows = np.sort(generator.choice(len(parents) + 1, generator.integers(1, len(parents) + 2), replace=False))
    found = generator.random((len(rows), 2 * WIDTH)).astype(np.float32)
    found[:, :WIDTH] = generator.integers(0, 10, (len(rows), WIDTH))
    found[generator.random(len(rows)) < 0.2, WIDTH:] = np.nan
    recycled = new_recycled(2, WIDTH)
    recycle(recycled, np.array(text), len(text), nodes, np.array(parents, np.int64), rows, found)

    def path(node: int) -> list[int]:
        return [*path(parents[node]), int(nodes[node])] if node >= 0 else text

    expected: dict[tuple[int, ...], tuple[list[int], list[float], int]] = {}
    for row, values in zip(rows, found, strict=True):
        for size in (1, 2):
            context = tuple(path(row - 1)[-size:])
            if len(context) == size and not np.isnan(values).any():
                seen = expected.get(context, ((), (), 0))[2]
                expected[context] = (values[:WIDTH].astype(int).tolist(), values[WIDTH:].tolist(), seen + 1)
    for context, row in expected.items():
        assert kept(recycled, context) == row
    assert np.count_nonzero(recycled.seen) == len(expected)


@pytest.mark.parametrize("runtime", ["eager", "graphed", "graphs", "whole model"])
def test_rows_are_those_of_the_verified_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    """What a drafter reads are the likeliest tokens, by the target itself, after the path to every row of the pass."""
    path = save_target(tmp_path, "llama", kv_heads=2, peak=6.0)
    model, stack = open_stack(path, torch.float64)
    if runtime == "whole model":
        stack = WholeModel(load_plain(open_target(str(path), by_layers=False), torch.float64, CPU))
    if runtime == "graphs":
        keep_contracts(monkeypatch)
    texts: list[list[int]] = []
    read: list[torch.Tensor] = []

    class Noting(MixedDrafter):
        def commit(self, tree: DraftTree, nodes: Any, tokens: Any) -> None:
            before = self._ids[: self._length + 1].tolist()
            paths = [before]
            for token, parent in zip(tree.tokens.tolist(), tree.parents, strict=True):
                paths.append([*paths[parent + 1], token])
            rows, found = self._session.top_tokens_of_rows()
            texts.extend(paths[row] for row in rows)
            read.extend(found.clone())
            super().commit(tree, nodes, tokens)

    drafter = Noting(TABLE, NgramConfig(evidence="mixed", nodes=6, depth=3, recycle=WIDTH))
    chosen = Runtime() if runtime in ("eager", "whole model") else Graphed()
    tokens = [
        t
        for r in speculative(stack, drafter, random_prompt(9) * 2, max_new_tokens=10, runtime=chosen)
        for t in r.tokens
    ]
    assert len(tokens) == 10 < len(read)
    for text, row in zip(texts, read, strict=True):
        distribution = model.double()(torch.tensor([text])).logits[0, -1].softmax(-1)
        probs, likeliest = distribution.topk(WIDTH)
        assert row[:WIDTH].long().tolist() == likeliest.tolist()
        torch.testing.assert_close(row[WIDTH:].double(), probs, rtol=1e-4, atol=1e-6)
