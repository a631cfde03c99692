"""The compiled searches against slow ones, and lossless decoding with all of them."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import preset
from outrider.base.errors import UserError
from outrider.base.streams import Streams
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.drafters.ngrams.drafter import TrigramDrafter, make_ngram_drafter
from outrider.inference.drafters.ngrams.ngram_search import next_random
from outrider.inference.drafters.prompt_lookup.drafter import PromptLookupPlugin
from outrider.inference.settings.method import MethodConfig, NgramConfig, StopConfig
from outrider.inference.sizing.costs import Costs
from outrider.inference.sizing.policy import Tuning
from tests.inference import ngram_cases as cases
from tests.inference.ngram_cases import FakeSession
from tests.inference.priced import costs
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


def slow_lookup(text: list[int], max_ngram: int, count: int, min_ngram: int = 1) -> list[int]:
    """The text after the latest earlier occurrence of the longest suffix that has one."""
    for size in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:]:
                return text[start + size :][:count]
    return []


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    rounds=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    limit=st.integers(0, 6),
)
def test_equals_a_search_of_the_text(prompt: list[int], rounds: list, sizes: tuple[int, int], limit: int) -> None:
    lookup = PromptLookup(sizes[0], 5, min_ngram=sizes[1])
    lookup.begin(FakeSession(prompt), None, None)
    text = list(prompt)
    for root, *rest in rounds:
        tree = lookup.draft(torch.tensor([root]), limit)
        assert tree.tokens.tolist() == slow_lookup([*text, root], sizes[0], min(limit, 5), sizes[1])
        lookup.commit(None, (), [root, *rest])
        text += [root, *rest]


N, PERIOD = 128, 40


def next_of(kind: str, share: float, seed: int) -> Callable[[list[int]], int]:
    """The target's next token after a text: one that no lookup says, or of `share` what came `PERIOD` tokens before."""
    cycle = [seed + 7 * place for place in range(PERIOD)]

    def unlike(text: list[int]) -> int:
        said = {token for size in (1, 2, 3) for token in slow_lookup(text, size, 1)}
        choices = [token for token in range(6) if token not in said]
        return random.Random(f"{seed} {len(text)}").choice(choices or [0])

    def again(text: list[int]) -> int:
        chance = random.Random(f"{seed} {len(text)}")
        return cycle[len(text) % PERIOD] if chance.random() < share else chance.randrange(500, 1000)

    return unlike if kind == "never" else again


def seconds_of(row: float) -> Costs:
    """Where each further row takes so much longer, of a pass over one."""
    return costs(step=0.002, verify=1 - row, node=row, rest=0.01)


def decoded(following: Callable[[list[int]], int], tuning: Tuning) -> tuple[float, float, float]:
    """A text of N tokens by the preset: tokens a second, where 1 is plain decoding's; the shares of rounds with a
    draft, of all and of those where one was found."""
    text: list[int] = []
    while len(text) < 2 * PERIOD:
        text.append(following(text))
    drafter = PromptLookupPlugin().make(None, preset("prompt_lookup"), Streams(0), drawn=False, tuning=tuning)
    drafter.begin(FakeSession(text), None, None)
    root, seconds, drafts, found, rounds, left = following(text), 0.0, 0, 0, 0, N
    while left > 0:
        tree = drafter.draft(torch.tensor([root]), left - 1)
        found += bool(slow_lookup([*text, root], 3, 1))
        text.append(root)
        accepted = 0
        root = following(text)
        for token in tree.tokens.tolist():
            if token != root:
                break
            accepted += 1
            text.append(token)
            root = following(text)
        drafter.commit(tree, range(accepted), text[-accepted - 1 :])
        count = len(tree)
        seconds += tuning.costs.verify[count + 1] + 0.012 if count else 1.0
        drafts, rounds, left = drafts + bool(count), rounds + 1, left - accepted - 1
    return N / seconds, drafts / rounds, drafts / max(1, found)


NOTHING_KNOWN = ((), ())
ALL_RIGHT, ALL_WRONG = ((20.0,) * 14, (20.0,) * 14), ((20.0,) * 14, (0.0,) * 14)


@pytest.mark.parametrize("row", [0.03, 0.12, 0.3])
@pytest.mark.parametrize("known", [NOTHING_KNOWN, ALL_RIGHT, ALL_WRONG], ids=["nothing", "right", "wrong"])
def test_what_is_never_right_is_seldom_submitted(row: float, known: Any) -> None:
    """Whatever the text before it promised."""
    for seed in range(2):
        rate, share, of_found = decoded(next_of("never", 0.0, seed), Tuning(seconds_of(row), *known))
        assert rate > 0.97
        assert 0 < share < 0.25
        assert of_found < 0.25


@pytest.mark.parametrize("row", [0.03, 0.12, 0.3])
@pytest.mark.parametrize("share", [0.5, 0.7])
def test_what_hardly_pays_costs_hardly_anything(row: float, share: float) -> None:
    for seed in range(4):
        rate, _, _ = decoded(next_of("again", share, seed), Tuning(seconds_of(row)))
        assert rate > 0.97


@pytest.mark.parametrize("row", [0.03, 0.12, 0.3])
def test_what_pays_is_submitted_nearly_always(row: float) -> None:
    rate, _, of_found = decoded(next_of("again", 1.0, 1), Tuning(seconds_of(row)))
    assert of_found > 0.85
    assert rate > 2
    rate, _, of_found = decoded(next_of("again", 0.95, 2), Tuning(seconds_of(row)))
    assert of_found > 0.85
    assert rate > 1.4
    rate, _, _ = decoded(next_of("again", 1.0, 3), Tuning(seconds_of(row), *ALL_WRONG))
    assert rate > 1.2  # a text before it in which nothing was right is overcome


def test_given_lengths_are_drafted_as_they_were_told() -> None:
    """And 8 where none is given."""
    for length, tuning in itertools.product((4, None), (None, Tuning(seconds_of(0.3)))):
        method = MethodConfig("prompt_lookup", stop=StopConfig(max_draft=length))
        drafter = PromptLookupPlugin().make(None, method, Streams(0), drawn=False, tuning=tuning)
        assert (drafter.max_rows, drafter.sizes) == (length or 8, None)
