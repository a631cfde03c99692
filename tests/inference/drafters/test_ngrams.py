"""The compiled searches against slow ones, and lossless decoding with all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.base.errors import UserError
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.drafters.ngram.ngram_search import next_random
from outrider.inference.drafters.ngram.ngrams import TrigramDrafter, make_ngram_drafter
from outrider.inference.settings.method import NgramConfig
from tests.inference import ngram_cases as cases
from tests.ngram_reading import successors
from tests.tiers import as_many


def slow_successors(drafter: TrigramDrafter, state: tuple[int, ...], widest: int | None = None) -> list:
    """(token, P), likeliest first: the overlay before the table among equals, each in its own order."""
    if len(state) < drafter.config.order - 1 or max(state) >= cases.VOCABULARY:
        return []
    raised = successors(drafter.overlay, state)
    tokens, probabilities = successors(drafter.table, state)
    own = list(zip(tokens.tolist(), probabilities.tolist(), strict=True))[:widest]
    return sorted([*raised.items(), *((t, p) for t, p in own if t not in raised)], key=lambda item: -item[1])


def state_after(text: list[int], path: tuple[int, ...], order: int) -> tuple[int, ...]:
    return tuple([*text, *path][-(order - 1) :])


@settings(deadline=None, max_examples=as_many(60))
@given(text=cases.TEXTS, order=st.integers(2, 4), nodes=st.integers(1, 30), depth=st.integers(1, 4))
def test_best_first_finds_the_largest_path_probabilities(text: list[int], order: int, nodes: int, depth: int) -> None:
    drafter = TrigramDrafter(cases.TABLE, NgramConfig(order=order, nodes=nodes, depth=depth, increment=0.3), 0)
    tree = cases.draft(drafter, text)
    everything: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    for _ in range(depth):
        level = [
            (path_prob * p, (*path, token))
            for path_prob, path in level
            for token, p in slow_successors(drafter, state_after(text, path, order))
        ]
        everything += level
    best = sorted((p for p, _ in everything), reverse=True)[:nodes]
    assert tree.path_probs.tolist() == pytest.approx(best)
    known = {path: p for p, path in everything}
    assert [known[path] for path in cases.paths_of(tree)] == pytest.approx(best)


def slow_puct(drafter: TrigramDrafter, text: list[int], depth: int) -> list[tuple[int, ...]]:
    """Algorithm 1 with every child of an expanded node there; the paths of the tree."""
    config, order = drafter.config, drafter.config.order
    seed = np.array([drafter.seed], np.uint64)
    root: dict = {"path": (), "p": 0.0, "n": 0, "w": 0.0, "children": None}
    sentences = []
    for _ in range(config.iterations):
        trail = [root]
        while trail[-1]["children"] and len(trail[-1]["path"]) < depth:
            children = trail[-1]["children"]
            total = sum(child["n"] for child in children)
            explore = config.c1 + np.log((total + config.c2 + 1) / config.c2)
            values = [
                (c["w"] / c["n"] if c["n"] else 0.0) + explore * np.sqrt(total) * (c["p"] / (1 + c["n"]))
                for c in children
            ]
            trail.append(children[int(np.argmax(values))])
        node = trail[-1]
        if node["children"] is None and len(node["path"]) < depth:
            found = slow_successors(drafter, state_after(text, node["path"], order), config.widest)
            node["children"] = [
                {"path": (*node["path"], t), "p": p, "n": 0, "w": 0.0, "children": None} for t, p in found
            ]
            if node["children"]:
                trail.append(node["children"][0])
        path, score = trail[-1]["path"], 1.0
        for passed in reversed(trail[1:]):  # added up in the same order, so that equal scores are equal
            score += passed["p"]
        ended = trail[-1]["children"] is not None
        while len(path) < depth and not ended:
            token, p = slow_sample(drafter, state_after(text, path, order), seed)
            ended = token is None
            if token is not None:
                path, score = (*path, token), score + p
        sentences.append((score, path))
        for node in trail:
            node["n"] += 1
            node["w"] += score
    tree: list[tuple[int, ...]] = []
    kept = 0
    for _, path in sorted(sentences, key=lambda item: -item[0]):
        if kept == config.sentences or len(tree) == config.nodes:
            break
        before = len(tree)
        for length in range(1, len(path) + 1):
            if path[:length] not in tree and len(tree) < config.nodes:
                tree.append(path[:length])
        kept += len(tree) > before
    return tree


def slow_sample(drafter: TrigramDrafter, state: tuple[int, ...], seed: np.ndarray) -> tuple[int | None, float]:
    raised = successors(drafter.overlay, state)
    tokens, probabilities = successors(drafter.table, state)
    own = list(zip(tokens.tolist(), probabilities.tolist(), strict=True))[: drafter.config.widest]
    if not raised and not own:
        return None, 0.0
    while True:
        height = random_number(seed) * (sum(raised.values()) + sum(p for _, p in own))
        for token, p in raised.items():
            height -= p
            if height < 0:
                return token, p
        for token, p in own:
            height -= p
            if height < 0:
                if token not in raised:
                    return token, p
                break


def random_number(seed: np.ndarray) -> float:
    number = float(next_random(seed))
    assert 0 <= number < 1
    return number


@pytest.mark.parametrize("seed", range(6))
def test_puct_equals_the_algorithm(seed: int) -> None:
    text = cases.make_documents()[seed][: 20 + seed]
    sizes = {"iterations": 60, "sentences": 8, "nodes": 20, "widest": 4} if seed % 2 else {}
    config = NgramConfig(search="puct", c1=(32.0, 2.0)[seed % 2], increment=0.15, order=2 + seed % 3, **sizes)
    drafter = TrigramDrafter(cases.TABLE, config, seed)
    tree = cases.draft(drafter, text)
    assert cases.paths_of(tree) == slow_puct(drafter, text, 4)
    assert len(tree) > 3 or config.order == 4  # which knows few contexts
    assert cases.paths_of(cases.draft(drafter, text)) == cases.paths_of(tree)  # from its seed again


def test_the_seed_matters_to_the_search() -> None:
    text = [1, 2, 3, 0, 4, 1, 5]
    config = NgramConfig(search="puct", iterations=20, order=2)
    seeds = (-1, 2**64 - 1, *range(8))
    found = [tuple(cases.paths_of(cases.draft(TrigramDrafter(cases.TABLE, config, seed), text))) for seed in seeds]
    assert found[0] == found[1]
    assert len({*found}) > 1


# --------------------------------------------------------------------------------------------------- in the runtime


def test_drafts_keep_to_limits() -> None:
    text = np.random.default_rng(4).integers(0, cases.VOCABULARY, 40).tolist()
    for config in cases.CONFIGS.values():
        drafter = make_ngram_drafter(cases.TABLE, config, 0)
        for limit in (0, 1, 3):
            tree = cases.draft(drafter, text, limit)
            assert max(map(len, cases.paths_of(tree)), default=0) == limit
            assert len(tree) <= drafter.max_rows
            assert tree.rows == (-1,) * len(tree)
        drafter.begin(cases.FakeSession([cases.VOCABULARY + 5]), None, None)
        assert len(drafter.draft(torch.tensor([cases.VOCABULARY + 7]), 5)) == 0


@pytest.mark.slow
def test_a_text_longer_than_its_buffers() -> None:
    for config in cases.CONFIGS.values():
        drafter = make_ngram_drafter(cases.TABLE, config, 0)
        drafter.begin(cases.FakeSession([1, 2]), None, None)
        for step in range(3000):
            root = step * step % cases.VOCABULARY
            if step % 500 == 0:
                drafter.draft(torch.tensor([root]), 3)
            drafter.commit(None, (), [root, (step + 1) % cases.VOCABULARY])
        tree = drafter.draft(torch.tensor([3]), 3)
        assert len(tree) > 0


def test_what_was_learnt_is_forgotten_with_the_text() -> None:
    table = TrigramTable.from_documents([[1, 2, 3, 1, 2, 3]], [3], cases.VOCABULARY, "t")
    drafter = TrigramDrafter(table, NgramConfig(depth=1), 0)
    assert cases.draft(drafter, [7, 8, 9, 7, 8]).tokens.tolist() == [9]
    assert cases.draft(drafter, [0, 7, 8]).tokens.tolist() != [9]


def test_tables_of_next_to_nothing() -> None:
    """One context, or none: every look-up stays inside the arrays."""
    for documents, found in (([[5, 6, 7]], True), ([[5]], False)):
        table = TrigramTable.from_documents(documents, [2, 3, 4], cases.VOCABULARY, "t")
        for config in cases.CONFIGS.values():
            drafter = make_ngram_drafter(table, config, 0)
            assert (7 in cases.draft(drafter, [1, 5, 6]).tokens.tolist()) == found
            for token in range(cases.VOCABULARY):
                assert set(cases.draft(drafter, [token, token, token]).tokens.tolist()) <= {6, 7, token}


def test_an_order_that_a_table_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="order=4: the n-gram table has orders"):
        make_ngram_drafter(cases.make_table(orders=(2, 3)), NgramConfig(order=4), 0)
