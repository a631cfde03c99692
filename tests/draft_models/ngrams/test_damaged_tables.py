"""A damaged n-gram table is refused by name, or drafts without a crash."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.draft_models.ngrams.table import ARRAYS, TrigramTable, table_digest
from outrider.inference.drafters.ngram.ngrams import make_ngram_drafter
from outrider.inference.settings.method import NgramConfig
from tests.inference.ngram_cases import VOCABULARY, draft, make_table
from tests.kept_code import kept_folder
from tests.refusals import refusal

ROOT = Path(__file__).parents[3]
CONFIGS = (
    NgramConfig(nodes=12),
    NgramConfig(nodes=12, search="puct", iterations=20, sentences=6),
    NgramConfig(nodes=12, evidence="mixed"),
)
TEXTS = ([0, 3, 1, 4, 1, 5], [7, 7, 2, 11, 0], [9])


TABLE = make_table(orders=(2, 3), suffixes=True)


def drafts(table: TrigramTable) -> list[tuple[list[int], tuple[int, ...]]]:
    trees = [draft(make_ngram_drafter(table, config, 0), text) for config in CONFIGS for text in TEXTS]
    return [(tree.tokens.tolist(), tree.parents) for tree in trees]


def test_a_table_is_known_by_all_that_it_holds(tmp_path: Path) -> None:
    table = tmp_path / "table"
    TABLE.save(table)
    copy = Path(shutil.copytree(table, tmp_path / "copy"))
    other = TrigramTable.from_documents([[1, 2, 3, 4]], (2, 3, 4), VOCABULARY, "t")
    other.save(tmp_path / "other")
    assert table_digest(table) == table_digest(copy) != table_digest(tmp_path / "other")


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("fill", ["zeros", "ones", "descending"])
def test_arrays_that_do_not_fit_together_are_refused_whatever_their_digests(
    tmp_path: Path, name: str, fill: str
) -> None:
    """A table from elsewhere may have digests that are right and arrays that compiled look-up must not meet."""
    level = TABLE.levels[3]
    array = getattr(level, name).copy()
    array[:] = {"zeros": 0, "ones": np.iinfo(array.dtype).max, "descending": array[::-1].copy()}[fill]
    replace(TABLE, levels={3: replace(level, **{name: array})}).save(tmp_path / "unsound")
    if (name, fill) in {("tokens", "zeros"), ("tokens", "descending"), ("totals", "ones")}:
        drafts(TrigramTable.open(tmp_path / "unsound"))  # wrong, and harmless
        return
    refusal(r"unsound: damaged n-gram table \(order 3: ", TrigramTable.open, tmp_path / "unsound")


@pytest.mark.slow
def test_compiled_code_stays_within_its_arrays_whatever_a_table_says(tmp_path: Path) -> None:
    """Tables with altered numbers and right digests, in a process whose compiled code checks bounds."""
    command = [sys.executable, "-m", "tests.inference.drafters.altered_tables", str(tmp_path)]
    kept = kept_folder("bounds_checked", "draft_models/ngrams/*.py", "inference/drafters/**/*.py")
    checked = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(kept)}  # it takes a minute to compile
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | checked, check=False)
    assert run.returncode == 0, run.stderr
    bounds, counts = run.stdout.splitlines()
    assert bounds == "bounds are checked"
    drafted, refused = (int(count.partition("=")[2]) for count in counts.split())
    assert min(drafted, refused) >= 4  # it refuses neither all nor none
