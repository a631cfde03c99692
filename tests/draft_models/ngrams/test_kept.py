"""What was learnt of texts, out of its map and back: every look-up finds the same, and the least used goes first."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_models.ngrams.kept import contexts_of, fault_of_contexts, from_arrays, map_of, most_used
from draft_models.ngrams.overlay import TextIndex
from tests.ngram_reading import successors
from tests.tiers import as_many

TEXTS = st.lists(st.integers(0, 7), min_size=2, max_size=60)
LONGEST = 3


def index_of(text: list[int]) -> TextIndex:
    index = TextIndex(LONGEST, decay=0.5)
    index.learn(np.array(text), 0, len(text))
    return index


def contexts_in(text: list[int]) -> Counter[tuple[int, ...]]:
    """Every context that something followed, and how often."""
    return Counter(
        tuple(text[end - size : end]) for end in range(1, len(text)) for size in range(1, min(LONGEST, end) + 1)
    )


@settings(deadline=None, max_examples=as_many(40))
@given(text=TEXTS, more=TEXTS)
def test_a_map_that_was_kept_goes_on_as_if_it_never_had_been(text: list[int], more: list[int]) -> None:
    """Both what it finds and what it learns next, in the same order among equals."""
    index, again = index_of(text), TextIndex(LONGEST, decay=0.5)
    again.known = map_of(contexts_of(index.known))
    for learner in (index, again):
        learner.learn(np.array([*text, *more]), len(text), len(text) + len(more))
    for context in contexts_in([*text, *more]):
        assert list(successors(again, context).items()) == list(successors(index, context).items()) != []
    assert again.known.used.tolist() == index.known.used.tolist()


@settings(deadline=None, max_examples=as_many(40))
@given(text=TEXTS, share=st.floats(0.1, 0.9))
def test_what_is_used_most_stays_within_the_limit(text: list[int], share: float) -> None:
    contexts, seen = contexts_of(index_of(text).known), contexts_in(text)
    limit = share * contexts.nbytes
    kept = most_used(contexts, limit)
    assert kept.nbytes <= limit
    assert fault_of_contexts(kept, 8) == ""
    left, index = TextIndex(LONGEST, decay=0.5), index_of(text)
    left.known = map_of(kept)
    stays = {context: bool(successors(left, context)) for context in seen}
    assert sum(stays.values()) == len(kept.keys)
    assert all(successors(left, context) == successors(index, context) for context in seen if stays[context])
    fewest = min((seen[context] for context in seen if stays[context]), default=9**9)
    dropped = [seen[context] for context in seen if not stays[context]]
    assert max(dropped) <= fewest
    assert most_used(contexts, contexts.nbytes) is contexts


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("tokens", lambda array: array + 8, "tokens that are not in the vocabulary"),
        ("tokens", lambda array: -1 - array, "tokens that are not in the vocabulary"),
        ("lengths", lambda array: array + 1, "lengths that are not those of its successors"),
        ("weights", lambda array: array * np.nan, "weights and counts that are no positive numbers"),
        ("sums", lambda array: 0 * array, "weights and counts that are no positive numbers"),
        ("sums", lambda array: 0.9 * array, "weights that are more than their sum"),
        ("sums", lambda array: 0 * array + 5e-324, "weights that are more than their sum"),
        ("weights", lambda array: 0 * array + 1e308, "weights that are more than their sum"),
        ("keys", lambda array: 0 * array, "a context that is there twice"),
        ("seen", lambda array: array[1:], "arrays of different lengths"),
    ],
)
def test_what_is_no_memory_is_told(name: str, change: object, fault: str) -> None:
    arrays = contexts_of(index_of([1, 2, 3, 1, 2, 4]).known)._asdict()
    assert fault_of_contexts(from_arrays(arrays), 8) == ""
    changed = from_arrays({**arrays, name: change(arrays[name])})  # type: ignore[operator]
    assert fault_of_contexts(changed, 8) == fault
    with pytest.raises(ValueError, match=f"no {name} of type"):
        from_arrays({**arrays, name: arrays[name].astype(np.float32)})
