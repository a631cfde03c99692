"""A damaged n-gram table is refused by name, or drafts as before: never a crash, never another draft."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draft_models.ngrams.table import TrigramTable
from draft_models.ngrams.table_files import ARRAYS, array_file, table_digest
from inference.drafters.ngram.ngrams import make_ngram_drafter
from inference.settings.method import NgramConfig
from outrider.errors import UserError
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


def save(folder: Path) -> Path:
    TABLE.save(folder)
    return folder


def drafts(table: TrigramTable) -> list[tuple[list[int], tuple[int, ...]]]:
    trees = [draft(make_ngram_drafter(table, config, 0), text) for config in CONFIGS for text in TEXTS]
    return [(tree.tokens.tolist(), tree.parents) for tree in trees]


def open_or_refusal(table: Path) -> TrigramTable | str:
    try:
        return TrigramTable.open(table)
    except UserError as error:
        return str(error)


def damaged(content: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """One byte changed, a stretch of another file or of zeros put in, two stretches swapped, cut off or made longer."""
    at = int(rng.integers(len(content)))
    size = min(int(rng.choice([1, 2, 4, 8, 64])), len(content) - at)
    match rng.choice(["byte", "bit", "zeros", "ones", "foreign", "swap", "cut", "longer", "exchange"]):
        case "byte":
            return content[:at] + bytes([rng.integers(256)]) + content[at + 1 :]
        case "bit":
            return content[:at] + bytes([content[at] ^ 1 << int(rng.integers(8))]) + content[at + 1 :]
        case "zeros":
            return content[:at] + bytes(size) + content[at + size :]
        case "ones":
            return content[:at] + b"\xff" * size + content[at + size :]
        case "foreign":
            return content[:at] + (other * size)[:size] + content[at + size :]
        case "swap":
            to = int(rng.integers(len(content)))
            first, last = sorted((at, to))
            width = min(size, last - first, len(content) - last)
            return b"".join(
                (content[:first], content[last : last + width], content[first + width : last],
                 content[first : first + width], content[last + width :])
            )  # fmt: skip
        case "cut":
            return content[:at]
        case "longer":
            return content + other[: max(1, size)]
        case _:
            return other


def cases(table: Path, count: int) -> Iterator[bool]:
    """`count` damages to the files in turn, each in place while this yields whether an array is another by it."""
    files = sorted(table.iterdir())
    whole = {file: file.read_bytes() for file in files}
    rng = np.random.default_rng(7)
    for number in range(count):
        file = files[number % len(files)]
        content = damaged(whole[file], whole[files[rng.integers(len(files))]], rng)
        file.write_bytes(content)
        yield content != whole[file] and file.suffix == ".bin"
        file.write_bytes(whole[file])


@pytest.mark.slow
def test_a_damaged_table_is_refused_or_drafts_the_same(tmp_path: Path) -> None:
    table = save(tmp_path / "table")
    expected, refused = drafts(TrigramTable.open(table)), 0
    for altered in cases(table, 500):
        opened = open_or_refusal(table)
        if isinstance(opened, TrigramTable):
            assert not altered
            assert drafts(opened) == expected
        else:
            refused += 1
            assert str(table) in opened
            assert "\n" not in opened
    assert 400 < refused < 500
    assert drafts(TrigramTable.open(table)) == expected


def test_a_table_is_known_by_all_that_it_holds(tmp_path: Path) -> None:
    table = save(tmp_path / "table")
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


@pytest.mark.slow
def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    """What ended the interpreter with SIGSEGV: the starts of a level overwritten in place."""
    table = save(tmp_path / "table")
    starts = table / array_file(3, "starts")
    starts.write_bytes(b"\xff" * starts.stat().st_size)
    script = (
        "import sys\nfrom conf import reported\nfrom draft_models.ngrams.table import TrigramTable\n"
        "with reported():\n    TrigramTable.open(sys.argv[1])\n"
    )
    run = subprocess.run([sys.executable, "-c", script, table], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith(f"error: {table}: damaged n-gram table (order3_starts.bin is altered")
