"""A damaged n-gram table is refused by name, or drafts without a crash; `verified` sees every damage."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.base.errors import UserError
from outrider.draft_models.ngrams.table import ARRAYS, TABLE_FILE, TrigramTable, table_digest, verified
from outrider.inference.drafters.ngram.ngrams import make_ngram_drafter
from outrider.inference.settings.method import NgramConfig
from tests.inference.ngram_cases import VOCABULARY, draft, make_table
from tests.kept_code import kept_folder

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


def damaged(content: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """A stretch of `other`, zeros or ones put in, two stretches swapped, cut off or made longer."""
    at, size = int(rng.integers(len(content))), int(rng.choice([1, 2, 4, 8, 64]))
    to = int(rng.integers(at, len(content)))
    match rng.choice(["foreign", "zeros", "ones", "swap", "cut", "longer"]):
        case "swap":
            size = min(size, to - at, len(content) - to)
            first, second = content[at : at + size], content[to : to + size]
            return content[:at] + second + content[at + size : to] + first + content[to + size :]
        case "cut":
            return content[:at]
        case "longer":
            return content + other[:size]
        case kind:
            filling = {"foreign": other, "zeros": bytes(size), "ones": b"\xff" * size}[kind]
            return content[:at] + filling[:size] + content[at + size :]


@pytest.mark.slow
def test_a_damaged_table_is_refused_or_drafts(tmp_path: Path) -> None:
    """Damages in place, everywhere in the file and in its header."""
    TABLE.save(tmp_path / "table")
    file = tmp_path / "table" / TABLE_FILE
    whole, rng, refusals = file.read_bytes(), np.random.default_rng(7), list[str]()
    start = 8 + int.from_bytes(whole[:8], "little")  # of the arrays
    for number in range(150):
        content = damaged(whole, rng.bytes(64), rng)
        if number % 4 == 0:
            content = damaged(whole[:start], whole[start:], rng) + whole[start:]
        file.write_bytes(content)
        try:
            drafts(TrigramTable.open(file.parent))
        except UserError as error:
            refusals.append(str(error))
            continue
        if content[start:] != whole[start:]:
            with pytest.raises(UserError, match="another sha256"):
                verified(file.parent)
    assert all(str(file.parent) in refusal and "\n" not in refusal for refusal in refusals)
    assert 60 < len(refusals) < 150
    file.write_bytes(whole)
    verified(file.parent)
    assert drafts(TrigramTable.open(file.parent)) == drafts(TABLE)


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
    with pytest.raises(UserError, match=r"unsound: damaged n-gram table \(order 3: "):
        TrigramTable.open(tmp_path / "unsound")


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
