"""The suffix array: against sorting and searching in plain Python; on disk; merged; as evidence of the mixture."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.data_prep.ngrams.counting import merge_tables
from outrider.draft_models.ngrams import suffixes
from outrider.draft_models.ngrams.kernels import read_only
from outrider.draft_models.ngrams.table import TrigramTable
from tests.inference.ngram_cases import VOCABULARY, make_documents
from tests.tiers import as_many

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=6)


def made(documents: list[list[int]], vocabulary: int = 4) -> TrigramTable:
    return TrigramTable.from_documents(documents, [2], vocabulary, "t", suffixes=True)


def slow_successors(documents: list[list[int]], context: list[int]) -> list[int | None]:
    """What follows every place of a context; None at the end of a document."""
    size = len(context)
    return [
        document[at + size] if at + size < len(document) else None
        for document in documents
        for at in range(len(document) - size + 1)
        if document[at : at + size] == context
    ]


@pytest.mark.parametrize("vocabulary", [4, 70_000, 2**21])
@settings(deadline=None, max_examples=15)
@given(documents=DOCUMENTS)
def test_places_are_sorted_by_what_begins_there(vocabulary: int, documents: list[list[int]]) -> None:
    """By the first `REACH` tokens, however many of them fit a word; separators last."""
    tokens = suffixes.join_documents(documents, vocabulary)
    kept = suffixes.sort_suffixes(tokens, vocabulary)
    padded = [*tokens.tolist(), *[vocabulary] * suffixes.REACH]
    assert kept.order.tolist() == sorted(range(len(tokens)), key=lambda at: (padded[at : at + suffixes.REACH], at))
    for token in range(4):
        inside = kept.order[kept.starts[token] : kept.starts[token + 1]]
        assert sorted(inside.tolist()) == np.flatnonzero(tokens == token).tolist()


@settings(deadline=None, max_examples=as_many(40))
@given(documents=DOCUMENTS, text=st.lists(st.integers(0, 4), min_size=1, max_size=20), seed=st.integers(0, 9))
def test_contexts_are_found_with_what_followed_them(documents: list[list[int]], text: list[int], seed: int) -> None:
    """Of every length, within documents only; a text that is in the corpus, or has an id beyond the table."""
    long = [document for document in documents if len(document) > suffixes.REACH]
    if long and seed:
        text = long[seed % len(long)][:-1][-seed - suffixes.REACH :]
    table = made(documents)
    kept, places = read_only(table.suffixes), suffixes.new_suffix_workspace()
    longest, narrow = suffixes.find_suffixes(kept, np.array(text[::-1], np.int64), len(text), places)
    for size in range(suffixes.LEAST, min(suffixes.REACH, len(text)) + 1):
        expected = slow_successors(documents, text[-size:])
        assert (size <= longest) == bool(expected)
        if expected:
            assert places.number[size] == len(expected)
            found, largest, seen = suffixes.count_successors(kept, size, narrow, places)
            assert seen == len(expected)
            known = [token for token in expected if token is not None]
            after = dict(zip(places.tokens[:found].tolist(), places.counts[:found].tolist(), strict=True))
            assert after == {token: known.count(token) for token in known}
            assert largest == max(map(known.count, known), default=0)


def slow_look_up(kept: suffixes.Suffixes, text: list[int]) -> dict[int, tuple[int, dict[int, int], int]]:
    """By size of the context that ends `text`: its places, what follows those looked at (in order), and their number.

    Contexts of FEW places and more are sampled; those longer than the first with fewer are looked for among its places.
    """
    tokens, vocabulary, among = kept.tokens.tolist(), len(kept.starts) - 1, kept.order.tolist()
    found: dict[int, tuple[int, dict[int, int], int]] = {}
    few = False
    for size in range(suffixes.LEAST, min(suffixes.REACH, len(text)) + 1):
        context = text[-size:]
        ends = [at + size for at in kept.order.tolist() if tokens[at : at + size] == context]
        if few:
            ends = [end for end in among if tokens[max(0, end - size) : end] == context]
        if not ends or max(context) >= vocabulary:
            break
        few = few or len(ends) < suffixes.FEW
        among = ends
        seen = ends if few else ends[:: len(ends) // suffixes.SAMPLE]
        after = [tokens[end] for end in seen if tokens[end] < vocabulary]
        found[size] = len(ends), {token: after.count(token) for token in dict.fromkeys(after)}, len(seen)
    return found


@pytest.mark.parametrize("shares", [[0.75, 0.15, 0.1], np.full(80, 1 / 80)])
def test_look_up_after_many_texts_equals_the_slow_one(shares: list[float]) -> None:
    """Of few tokens, whose contexts have very many places, and of many; what is remembered of other texts stays true.

    Texts are of the corpus, of chance, or have an id beyond it.
    """
    random, vocabulary = np.random.default_rng(1), len(shares)
    documents = [random.choice(vocabulary, size, p=shares).tolist() for size in (1500, 1000, 3, 0, 400)]
    documents.append(documents[0][200:700])
    kept, places = read_only(made(documents, vocabulary).suffixes), suffixes.new_suffix_workspace()
    sizes = set()
    for number in range(vocabulary + 100):
        document = documents[random.choice([0, 1, 4, 5])]
        end = int(random.integers(suffixes.LEAST, len(document) + 1))
        text = document[max(0, end - random.integers(suffixes.LEAST, 20)) : end] if number % 4 else [0] * (number % 15)
        text += [[], [int(random.integers(vocabulary))], [vocabulary], [0]][number % 4 if number % 3 == 0 else 0]
        expected = slow_look_up(kept, text)
        longest, narrow = suffixes.find_suffixes(kept, np.array(text[::-1], np.int64), len(text), places)
        assert longest == max(expected, default=suffixes.LEAST - 1)
        for size, (total, after, looked_at) in expected.items():
            found, largest, seen = suffixes.count_successors(kept, size, narrow, places)
            assert (places.number[size], seen) == (total, looked_at)
            assert list(zip(places.tokens[:found], places.counts[:found], strict=True)) == list(after.items())
            assert largest == max(after.values(), default=0)
            sizes.add((size, total >= suffixes.FEW))
    assert {(size, False) for size in range(suffixes.LEAST, suffixes.REACH + 1)} <= sizes
    assert vocabulary > 3 or {(suffixes.LEAST, True), (suffixes.REACH, True)} <= sizes


def test_no_context_reaches_over_two_documents() -> None:
    """What separates them is followed by nothing, is no successor, and no id of a text is it."""
    kept, places = read_only(made([[0, 1, 2, 3]] * 2).suffixes), suffixes.new_suffix_workspace()
    longest, narrow = suffixes.find_suffixes(kept, np.array([3, 2, 1, 0]), 4, places)
    assert longest == 4
    assert suffixes.count_successors(kept, 4, narrow, places) == (0, 0, 2)
    assert suffixes.find_suffixes(kept, np.array([1, 0, 4, 3, 2]), 5, places)[0] == suffixes.LEAST - 1


def test_many_places_are_sampled_evenly() -> None:
    """Half of very many places say what the whole does; of longer contexts, few of them, all are looked at."""
    documents = [[0, 1, 1, 1, 1, token] for token in [2] * 300] + [[3, 1, 1, 1, 1, 3]] * 100
    kept, places = read_only(made(documents).suffixes), suffixes.new_suffix_workspace()
    longest, narrow = suffixes.find_suffixes(kept, np.array([1, 1, 1, 1, 3]), 5, places)
    assert (longest, narrow) == (5, 5)
    assert places.number[4:6].tolist() == [400, 100]
    for size, shares in ((4, {2: 0.75, 3: 0.25}), (5, {3: 1.0})):
        found, _, seen = suffixes.count_successors(kept, size, narrow, places)
        after = dict(zip(places.tokens[:found].tolist(), (places.counts[:found] / seen).tolist(), strict=True))
        assert after == pytest.approx(shares, abs=0.02)
        assert suffixes.SAMPLE <= seen < suffixes.FEW


def test_saved_opened_and_merged_it_is_the_same(tmp_path: Path) -> None:
    documents = make_documents()
    whole = made(documents, VOCABULARY)
    whole.save(tmp_path / "whole")
    opened = TrigramTable.open(tmp_path / "whole")
    halves = [made(documents[:7], VOCABULARY), made(documents[7:], VOCABULARY)]
    both = merge_tables(halves, 1, None, tmp_path / "both", 10**8)
    assert whole.suffixes is not None
    for other in (opened.suffixes, both.suffixes):
        assert other is not None
        for array, same in zip(whole.suffixes, other, strict=True):
            np.testing.assert_array_equal(array, same)
            assert array.dtype == same.dtype
    assert opened.nbytes == whole.nbytes == sum(array.nbytes for array in opened.arrays.values())


def test_arrays_that_look_up_cannot_rely_on() -> None:
    kept = made(make_documents(), VOCABULARY).suffixes
    assert kept is not None
    assert suffixes.find_suffix_fault(kept, VOCABULARY) == ""
    assert "places" in suffixes.find_suffix_fault(kept._replace(order=kept.order + np.uint32(1)), VOCABULARY)
    assert "ascend" in suffixes.find_suffix_fault(kept._replace(starts=kept.starts[::-1].copy()), VOCABULARY)
    for wrong in (kept._replace(order=kept.order[:-1]), kept._replace(tokens=kept.tokens.astype(np.uint32))):
        assert "arrays" in suffixes.find_suffix_fault(wrong, VOCABULARY)
