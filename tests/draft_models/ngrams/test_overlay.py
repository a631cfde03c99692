"""Overlay and text index against dictionaries."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft_models.ngrams.overlay import Overlay, TextIndex
from outrider.draft_models.ngrams.table import TrigramTable
from tests.ngram_reading import successors
from tests.refusals import refusal

VOCABULARY = 9
TEXTS = st.lists(st.integers(0, VOCABULARY + 1), min_size=1, max_size=60)  # the largest ids are beyond the table


def make_table(vocabulary: int = VOCABULARY, tokenizer: str = "t") -> TrigramTable:
    generator = np.random.default_rng(3)
    documents = [generator.integers(0, vocabulary, 40).tolist() for _ in range(6)]
    return TrigramTable.from_documents(documents, [2, 3, 4], vocabulary, tokenizer)


def slow_overlay(table: TrigramTable, order: int, text: list[int], increment: float, highest: float) -> dict:
    """Algorithm 2, as printed."""
    raised: dict[tuple[int, ...], dict[int, float]] = defaultdict(dict)
    for end in range(order - 1, len(text)):
        gram = text[end - order + 1 : end + 1]
        if max(gram) >= table.vocabulary:
            continue
        context, token = tuple(gram[:-1]), gram[-1]
        tokens, probabilities = successors(table, context)
        known = dict(zip(tokens.tolist(), probabilities.tolist(), strict=True))
        raised[context][token] = min(raised[context].get(token, known.get(token, 0.0)) + increment, highest)
    return raised


@settings(deadline=None)
@given(text=TEXTS, order=st.integers(2, 4), cut=st.integers(0, 60))
def test_overlay_equals_the_algorithm(text: list[int], order: int, cut: int) -> None:
    table = make_table()
    overlay = Overlay(table, order, increment=0.3, highest=0.8)
    ids = np.array(text)
    cut = min(cut, len(text))
    overlay.learn(ids, 0, cut)  # in two pieces: contexts reach over the cut
    overlay.learn(ids, cut, len(text))
    for context, expected in slow_overlay(table, order, text, 0.3, 0.8).items():
        found = successors(overlay, context)
        assert found == pytest.approx(expected)
        assert list(found.values()) == sorted(found.values(), reverse=True)
    assert overlay.contexts.used[0] == len(slow_overlay(table, order, text, 0.3, 0.8))
    overlay.reset()
    assert successors(overlay, text[: order - 1]) == {}


def test_of_equals_the_newest_comes_first() -> None:
    overlay = Overlay(make_table(), 2, increment=1.0, highest=0.8)
    for text, order in (([1, 2], [2]), ([1, 3], [3, 2]), ([1, 2], [2, 3])):
        overlay.learn(np.array(text), 0, 2)
        assert list(successors(overlay, [1]).items()) == [(token, 0.8) for token in order]


def test_what_the_table_lacks() -> None:
    table = TrigramTable.from_documents([[1, 2, 3]], [3], 12, "t")
    refusal(r"order=2: the n-gram table has orders \[3\]", Overlay, table, 2)
    overlay = Overlay(table, 3)
    overlay.learn(np.array([1, 2, 3]), 0, 3)
    assert successors(overlay, [1, 2]) == {3: 0.7}
    assert successors(overlay, [1, 16 + 2]) == successors(overlay, [0, 16 + 2]) == {}  # 16: the next bit of the key


@pytest.mark.slow
def test_grows_without_losing_anything() -> None:
    overlay = Overlay(make_table(500), 3, increment=0.5)
    text = np.random.default_rng(0).integers(0, 500, 6000)
    for start in range(0, 6000, 7):
        overlay.learn(text, start, min(start + 7, 6000))
    assert len(overlay.contexts.slots) > 2048
    for context, expected in slow_overlay(overlay.table, 3, text.tolist(), 0.5, 0.9).items():
        assert successors(overlay, context) == pytest.approx(expected)


@settings(deadline=None)
@given(text=TEXTS, longest=st.integers(1, 5), cut=st.integers(0, 60))
def test_text_index_counts_what_followed(text: list[int], longest: int, cut: int) -> None:
    index = TextIndex(longest, decay=0.5)
    cut = min(cut, len(text))
    index.learn(np.array(text), 0, cut)
    index.learn(np.array(text), cut, len(text))
    expected: dict[tuple[int, ...], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for end in range(1, len(text)):
        for size in range(1, min(longest, end) + 1):
            counts = expected[tuple(text[end - size : end])]
            for token in counts:
                counts[token] *= 0.5
            counts[text[end]] += 1
    for context, counts in expected.items():
        assert successors(index, context) == pytest.approx(dict(counts))
    assert index.contexts.used[0] == len(expected)
