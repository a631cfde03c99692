"""ADED's rows: a greedy search explores nothing, and its peers say what they lack."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.draft_models.ngrams.table import TrigramTable
from outrider.inference.drafters.ngrams.ngram_search import exploration

VOCABULARY = 12


def table_of(document: Sequence[int], suffixes: bool = True) -> TrigramTable:
    return TrigramTable.from_documents([document], (3,), VOCABULARY, "digest", suffixes=suffixes)


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
    assert ("suffixes" in found["REST, all prompts"]) != suffixes
    assert recorded or "--code-table" in found["REST, code, with a table of code"]
