"""ADED's rows and its peer: a greedy search explores nothing, REST is what its paper says."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.draft_models.ngrams.suffixes import read_only, separated, sort_suffixes
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.drafters.ngram.ngram_search import exploration
from tests.exact_distributions import paths

VOCABULARY = 12


def table_of(document: Sequence[int], suffixes: bool = True) -> TrigramTable:
    return TrigramTable.from_documents([document], (3,), VOCABULARY, "digest", suffixes=suffixes)


def corpus() -> list[list[int]]:
    """Documents with frequent, rare and long repetitions."""
    random = np.random.default_rng(0)
    often = random.integers(0, VOCABULARY, 30).tolist()
    return [[*random.integers(0, 5, random.integers(1, 40)).tolist(), *often[at:]] for at in range(25) for _ in "12"]


def followers(documents: Sequence[Sequence[int]], text: Sequence[int]) -> Counter[tuple[int, ...]]:
    """What follows the longest suffix of `text`, of 16 to 2 tokens, that is in a document: every beginning, counted."""
    for size in range(min(16, len(text)), 1, -1):
        found: Counter[tuple[int, ...]] = Counter()
        places = [(d, at + size) for d in documents for at in range(len(d)) if list(d[at : at + size]) == text[-size:]]
        for document, at in places:
            found.update(tuple(document[at:end]) for end in range(at + 1, min(at + 10, len(document)) + 1))
        if places:
            return found
    return Counter()


def test_rest_drafts_what_follows_the_longest_suffix_most_often() -> None:
    from papers.peers import continuations, most_frequent

    documents = corpus()
    suffixes = read_only(sort_suffixes(separated(documents, VOCABULARY), VOCABULARY))
    random = np.random.default_rng(1)
    texts = [d[: random.integers(1, len(d) + 1)] for d in documents] + [
        random.integers(0, 5, 9).tolist() for _ in "123"
    ]
    lengths = set()
    for text in [*texts, [11, 11, 11], [3], [99, 98]]:
        expected = followers(documents, list(text))
        tokens, parents = most_frequent(continuations(suffixes, text), 14)
        _, *drafted = paths(tokens.tolist(), parents.tolist())
        assert len(set(drafted)) == len(drafted) == min(14, len(expected))
        kept, left = [expected[path] for path in drafted], [expected[path] for path in set(expected) - set(drafted)]
        assert min(kept, default=1) >= max(left, default=1)
        assert kept == sorted(kept, reverse=True)
        lengths.add(len(expected))
    assert len(lengths) > 5
    assert most_frequent(continuations(suffixes, texts[0])[:, :0], 5)[0].size == 0


def test_only_some_of_many_occurrences_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import papers.peers as peers

    documents = [[1, 2, 3 + number % 4] for number in range(40)]
    suffixes = read_only(sort_suffixes(separated(documents, VOCABULARY), VOCABULARY))
    assert len(peers.continuations(suffixes, [1, 2])) == 40
    monkeypatch.setattr(peers, "RETRIEVED", 8)
    assert Counter(peers.continuations(suffixes, [1, 2])[:, 0].tolist()) == {3: 2, 4: 2, 5: 2, 6: 2}


def test_rest_is_replayed_over_the_table_of_its_row(tmp_path: Path) -> None:
    """A corpus that has the answer drafts it whole; the other one knows nothing of it."""
    from papers.claims import Row
    from papers.measuring import Asked, Bench
    from papers.peers import rest

    text = [*range(12), *range(11, -1, -1)]
    tables = [table_of(document) for document in (text, [5] * 9)]
    bench = Bench(None, {"ngrams": tables[1]}, VOCABULARY, 4, others={"told": tables[0]})
    asked = Asked("a", "c", tuple(text[:3]), tuple(text[3:]))
    told = rest(bench, Row("r", measure=rest, x=10, other="told"), asked)
    assert (told["tokens"], told["rounds"], told["accepted"]) == (20, 2, 18)
    alone = rest(bench, Row("r", measure=rest, x=10), asked)
    assert (alone["rounds"], alone["drafted"]) == (20, 0)


def test_greedy_search_explores_nothing() -> None:
    from papers.aded import GREEDY, PAPER

    assert not exploration(GREEDY.iterations, GREEDY.c1, GREEDY.c2).any()
    assert exploration(150, 0.0, PAPER.c2)[1:].all()  # as C1 = 0 alone does


@pytest.mark.parametrize(("suffixes", "recorded"), [(True, False), (False, True)])
def test_peers_say_what_they_lack(tmp_path: Path, suffixes: bool, recorded: bool) -> None:
    from papers.aded import tables

    table_of([1, 2, 3, 1, 2, 3], suffixes).save(tmp_path / "table")
    given = SimpleNamespace(table=[str(tmp_path / "table")], code_table=None, transcripts="t" if recorded else None)
    found = {row.name: row.never for row in tables(options=given, categories=["code"])["table_1"].rows}
    assert bool(found["REST, all prompts"]) != suffixes
    assert recorded or "--code-table" in found["REST, code, with a table of code"]
