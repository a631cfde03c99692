"""The n-gram table against counting in plain Python; its files and errors."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from outrider.draft_models.ngrams.kernels import MAX_VOCABULARY, Grams, merge_grams, mix
from outrider.draft_models.ngrams.table import ARRAYS, TABLE_FILE, TrigramTable, table_digest
from outrider.inference.drafters.ngrams.drafter import make_ngram_drafter
from outrider.inference.settings.method import NgramConfig
from tests.inference.ngram_cases import VOCABULARY, draft, make_table
from tests.kept_code import kept_folder
from tests.ngram_reading import successors
from tests.refusals import refusal

ORDERS = (2, 3, 4)
Context = tuple[int, ...]


def random_documents(vocabulary: int, count: int = 30, seed: int = 0) -> list[list[int]]:
    """Documents of 0 to 60 tokens from 12 ids, with the highest id."""
    rng = np.random.default_rng(seed)
    known = np.r_[rng.choice(vocabulary - 1, 11, replace=False), vocabulary - 1]
    return [rng.choice(known, rng.integers(0, 60)).tolist() for _ in range(count)]


def reference(documents: Sequence[Sequence[int]], order: int) -> dict[Context, list[tuple[int, int]]]:
    """Context → [(token, count)], most frequent first, then the lowest token."""
    counted = Counter(tuple(d[i : i + order]) for d in documents for i in range(len(d) - order + 1))
    found: dict[Context, list[tuple[int, int]]] = {}
    for gram, count in sorted(counted.items(), key=lambda item: (-item[1], item[0])):
        found.setdefault(gram[:-1], []).append((gram[-1], count))
    return found


def make(documents: Sequence[Sequence[int]], vocabulary: int = 300, **options: object) -> TrigramTable:
    return TrigramTable.from_documents(documents, ORDERS, vocabulary, "a tokenizer", **options)


def same(first: TrigramTable, second: TrigramTable) -> bool:
    return list(first.levels) == list(second.levels) and all(
        np.array_equal(getattr(first.levels[order], name), getattr(second.levels[order], name))
        for order in first.levels
        for name in ARRAYS
    )


@pytest.mark.parametrize("vocabulary", [13, 300, 2**16, 2**16 + 1, MAX_VOCABULARY])
def test_probabilities_are_relative_counts_within_documents(vocabulary: int) -> None:
    documents = random_documents(vocabulary)
    table = make(documents, vocabulary)
    for order in ORDERS:
        expected = reference(documents, order)
        assert len(table.levels[order].keys) == len(expected)
        for context, counted in expected.items():
            tokens, probabilities = successors(table, context)
            assert tokens.tolist() == [token for token, _ in counted]
            total = sum(count for _, count in counted)
            np.testing.assert_allclose(probabilities, [count / total for _, count in counted])


def test_no_ngram_crosses_a_document_boundary() -> None:
    table = make([[1, 2], [3, 4], [5], []])
    assert successors(table, [1])[0].tolist() == [2]
    assert successors(table, [2])[0].tolist() == []
    assert len(table.levels[3].keys) == len(table.levels[4].keys) == 0


def test_what_is_left_out_still_counts_in_the_denominator() -> None:
    document = [1, 9] * 5 + [1, 7] * 3 + [1, 8] * 3 + [1, 6]
    tokens, probabilities = successors(make([document], min_count=2), [1])
    assert tokens.tolist() == [9, 7, 8]
    np.testing.assert_allclose(probabilities, [5 / 12, 3 / 12, 3 / 12])
    tokens, probabilities = successors(make([document], max_successors=2), [1])
    assert tokens.tolist() == [9, 7]  # of equal counts the lower id
    np.testing.assert_allclose(probabilities, [5 / 12, 3 / 12])
    assert not len(make([document], min_count=6).levels[2].keys)


def test_unknown_contexts_and_ids_beyond_the_vocabulary_have_no_successors() -> None:
    table = make([[1, 2, 3, 4]])
    assert successors(table, [2, 1])[0].size == 0
    for alias in (300, 512 + 1, -511, 2**21):  # 512 + 1 would pack like 1 with a carry
        assert successors(table, [alias])[0].size == 0
        assert successors(table, [alias, 2])[0].size == 0


def test_a_table_of_a_single_context_finds_it_and_no_other() -> None:
    for token in range(256):
        table = TrigramTable.from_documents([[token, 1]], (2,), 256, "t")
        assert table.levels[2].shift == table.levels[2].key_bits  # one bucket: no bit of a key is left
        assert [context for context in range(256) if successors(table, [context])[0].size] == [token]
        assert successors(table, [token])[0].tolist() == [1]


@pytest.mark.parametrize("width", range(1, 13))
def test_mix_is_a_bijection_on_its_width(width: int) -> None:
    assert sorted(int(mix(x, width)) for x in range(2**width)) == list(range(2**width))


@pytest.mark.parametrize("width", [30, 45, 63])
def test_mix_is_what_it_says_and_its_top_bits_spread(width: int) -> None:
    def slow(x: int) -> int:
        half, mask = (width + 1) // 2, 2**width - 1
        x ^= x >> half
        x = x * 0xBF58476D1CE4E5B9 & mask
        x ^= x >> half
        x = x * 0x94D049BB133111EB & mask
        return x ^ (x >> half)

    values = [int(x) for x in np.random.default_rng(0).integers(0, 2**width, 100)] + [0, 2**width - 1]
    assert [int(mix(np.uint64(x), width)) for x in values] == [slow(x) for x in values]
    tops = Counter(int(mix(np.uint64(x), width)) >> (width - 6) for x in range(6400))
    assert len(tops) == 64
    assert max(tops.values()) < 200  # 100 expected


def test_counts_saturate_when_added() -> None:
    def single(count: int) -> Grams:
        return Grams(np.array([5], np.uint64), np.array([3], np.uint32), np.array([count], np.uint32))

    assert merge_grams(single(2**32 - 2), single(7))[2].tolist() == [2**32 - 1]
    assert merge_grams(single(2**31), single(7))[2].tolist() == [2**31 + 7]


def test_a_saved_table_opens_as_it_was_mapped_read_only(tmp_path: Path) -> None:
    table = make(random_documents(300))
    table.save(tmp_path / "table")
    opened = TrigramTable.open(tmp_path / "table")
    assert same(table, opened)
    assert (opened.vocabulary, opened.tokenizer, opened.facts) == (table.vocabulary, table.tokenizer, table.facts)
    with pytest.raises(ValueError, match="read-only"):
        opened.levels[3].counts[0] = 1
    assert [path.name for path in tmp_path.iterdir()] == ["table"]
    refusal("holds an n-gram table already", table.save, tmp_path / "table")


def truncate(table: Path) -> None:
    content = (table / TABLE_FILE).read_bytes()
    (table / TABLE_FILE).write_bytes(content[:-4])


def stored(table: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """The arrays and the header of a table."""
    with safe_open(table / TABLE_FILE, "np") as file:
        header = json.loads(file.metadata()["ngrams"])
    return load_file(table / TABLE_FILE), header


def change(key: str, value: object) -> Callable[[Path], None]:
    def edit(table: Path) -> None:
        arrays, header = stored(table)
        save_file(arrays, table / TABLE_FILE, {"ngrams": json.dumps({**header, key: value})})

    return edit


def without(name: str) -> Callable[[Path], None]:
    def edit(table: Path) -> None:
        arrays, header = stored(table)
        save_file(
            {other: arrays[other] for other in arrays if other != name},
            table / TABLE_FILE,
            {"ngrams": json.dumps(header)},
        )

    return edit


@pytest.mark.parametrize(("damage", "message"), [
    (truncate, "no readable n-gram table"),
    (lambda table: (table / TABLE_FILE).unlink(), r"no readable n-gram table .*outrider build-trigrams"),
    (change("format", 99), "format=99"),
    (change("vocabulary", 2**22), "vocabulary=4194304"),
    (change("vocabulary", 2**17), "order 2: tokens are .* of uint16"),
    (without("3.counts"), "no array '3.counts'"),
])  # fmt: skip
def test_a_damaged_table_is_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    make(random_documents(300)).save(tmp_path / "table")
    damage(tmp_path / "table")
    refusal(message, TrigramTable.open, tmp_path / "table")


@pytest.mark.parametrize(("options", "message"), [
    ({"vocabulary": MAX_VOCABULARY + 1}, "vocabulary=2097153: expected 1 to 2097152"),
    ({"vocabulary": 3}, "token id=3"),
    ({"orders": (5,)}, "orders="),
])  # fmt: skip
def test_impossible_tables_are_refused(options: dict[str, object], message: str) -> None:
    arguments = {"documents": [[1, 2, 3]], "orders": (3,), "vocabulary": 4, "tokenizer": "t", **options}
    refusal(message, TrigramTable.from_documents, **arguments)


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
    replace(TABLE, levels={3: level._replace(**{name: array})}).save(tmp_path / "unsound")
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
