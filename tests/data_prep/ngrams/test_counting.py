"""Counting out of core, merging and pruning in bounded memory: as in memory, bit for bit."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from outrider.data_prep.ngrams import counting
from outrider.data_prep.ngrams.counting import (
    count_order,
    count_runs,
    group_partitions,
    merge_tables,
    smallest_min_count,
)
from outrider.data_prep.ngrams.token_shards import (
    Passage,
    Shards,
    passages,
    read_token_shard,
    tokenise,
    whole_documents,
)
from outrider.draft_models.ngrams.kernels import MAX_VOCABULARY
from outrider.draft_models.ngrams.table import TrigramTable
from outrider.draft_models.targets.encoder import Encoder, open_encoder
from tests.data_prep.ngrams.corpora import require_same_counts
from tests.ngram_reading import level_bytes, successors
from tests.refusals import refusal


@pytest.mark.parametrize(("vocabulary", "memory"), [(300, 10**4), (300, 10**6), (MAX_VOCABULARY, 10**4)])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_blocks_and_ranges_of_any_size_count_the_same(tmp_path: Path, vocabulary: int, memory: int, order: int) -> None:
    """Order 4 of the largest vocabulary needs 84 bits an n-gram, so it takes the sort for wide ones."""
    rng = np.random.default_rng(order)
    known = rng.choice(vocabulary, 12, replace=False)
    documents = [rng.choice(known, rng.integers(0, 30)) for _ in range(400)]
    texts = [Passage(str(number), ends=False) for number in range(400)]
    encoder = Encoder(lambda batch: [documents[int(text)].tolist() for text in batch], {}, None, "")
    encoder = encoder._replace(pieces={"last": vocabulary - 1})
    (tmp_path / "shards").mkdir()
    shards = tokenise(texts, "", None, encoder, tmp_path / "shards", 1, shard=30)
    assert len(shards.paths) > 30
    runs = count_runs(shards, order, vocabulary, memory, tmp_path / "runs")
    assert len(runs.bounds) == 1 if memory == 10**6 else len(runs.bounds) > 10
    level = count_order(shards, order, vocabulary, tmp_path / "level", memory, 2, 5)
    reference = TrigramTable.from_documents(documents, [order], vocabulary, "", 2, 5)
    assert len(reference.levels[order].keys) > 0
    require_same_counts(replace(reference, levels={order: level}), reference)
    assert not (tmp_path / "level" / "runs").exists()


def test_ranges_are_as_large_as_memory_allows() -> None:
    rows = np.array([3, 3, 3, 9, 0, 1, 1])
    assert [*group_partitions(rows, 6)] == [(0, 2), (2, 3), (3, 4), (4, 7)]
    assert [*group_partitions(rows, 1)] == [(i, i + 1) for i in range(4)] + [(4, 6), (6, 7)]


ORDERS, VOCABULARY = (2, 3, 4), 300


def documents_of(seed: int, count: int) -> list[np.ndarray]:
    """Of 14 tokens, so that counts are often the same, and of rare ones."""
    random = np.random.default_rng(seed)
    return [random.integers(0, random.choice([14, VOCABULARY]), random.integers(0, 60)) for _ in range(count)]


def made(documents: Sequence[Sequence[int] | np.ndarray], *limits: int | None) -> TrigramTable:
    return TrigramTable.from_documents(documents, ORDERS, VOCABULARY, "t", *limits, suffixes=True)


PARTS = [documents_of(seed, count) for seed, count in enumerate((80, 50, 0, 1, 60))]
JOINED = [document for part in PARTS for document in part]


@pytest.mark.parametrize("limits", [(1, None), (2, None), (3, 2), (10**6, None)])
def test_a_sum_is_the_table_of_the_joined_corpora(tmp_path: Path, limits: tuple[int, int | None]) -> None:
    """However small the parts; what is rare in each may be frequent in all. Of what was left out, totals still tell."""
    expected, tables = made(JOINED, *limits), [made(part) for part in PARTS]
    for memory in (1, 200_000, 10**8):
        built = merge_tables(tables, *limits, tmp_path / str(memory), memory)
        require_same_counts(built, expected)
        assert built.facts["tokens"] == sum(map(len, JOINED))
        again = merge_tables(
            [merge_tables([built], 2, None, tmp_path / f"{memory}a", memory)], 3, 2, tmp_path / f"{memory}b", memory
        )
        if limits == (1, None):
            require_same_counts(again, made(JOINED, 3, 2))


def test_what_parts_left_out_is_in_the_totals_of_the_sum(tmp_path: Path) -> None:
    first, second = made([[1, 2] * 3 + [1, 3]], 2), made([[1, 4] * 2 + [1, 5], [9, 9, 9]], 2)
    tokens, probabilities = successors(merge_tables([first, second], 1, None, tmp_path, 10**8), [1])
    assert tokens.tolist() == [2, 4]
    np.testing.assert_allclose(probabilities, [3 / 7, 2 / 7])


def test_counts_of_a_sum_saturate(tmp_path: Path) -> None:
    table = made([[1, 2, 1, 2]])
    level = table.levels[2]
    most = np.full_like(level.counts, 2**32 - 3), np.full_like(level.totals, 2**32 - 3)
    full = replace(table, levels={2: level._replace(counts=most[0], totals=most[1])})
    both = merge_tables([full, replace(table, levels={2: level}), full], 1, None, tmp_path, 10**8).levels[2]
    assert (both.counts == 2**32 - 1).all()
    assert (both.totals == 2**32 - 1).all()


def test_parts_are_as_small_as_memory_wants_them() -> None:
    levels = [made(part).levels[4] for part in PARTS]
    for memory, least in ((10**8, 1), (100_000, 5)):
        sizes = [len(part.counts) for part in counting.merge_level(levels, VOCABULARY, 1, None, memory)]
        assert len(sizes) >= least
        assert max(sizes) <= memory // counting._ROW_BYTES
        assert sum(sizes) == len(made(JOINED).levels[4].counts)


def test_pruned_to_a_size_no_more_is_left_out_than_must_be(tmp_path: Path) -> None:
    whole = made(JOINED)
    assert smallest_min_count(whole, level_bytes(whole) / 1e6) == 1
    for size in np.linspace(0.9, 0.02, 5) * level_bytes(whole) / 1e6:
        count = smallest_min_count(whole, size)
        sizes = [
            level_bytes(merge_tables([whole], c, None, tmp_path / f"{size} {c}", 50_000)) for c in (count, count - 1)
        ]
        assert sizes[0] <= size * 10**6 < sizes[1]
    refusal(r"max_mb=1e-06: expected room", smallest_min_count, whole, 1e-6)


ROOT = Path(__file__).parents[3]


def test_shards_hold_what_was_tokenised(tmp_path: Path, model: str) -> None:
    encoder = open_encoder(model, None)
    assert isinstance(encoder.eos, int)
    texts = list(passages([{"id": "1", "text": "hello there"}], "all", encoder))
    shards: Shards = tokenise([*texts, Passage("you", ends=False)], model, None, encoder, tmp_path, 1)
    ids, lengths = read_token_shard(shards.paths[0])
    first, second = encoder.encode(["hello there", "you"])
    assert ids.tolist() == [*first, encoder.eos, *second]
    assert lengths.tolist() == [len(first) + 1, len(second)]
    assert (shards.tokens, shards.documents) == (len(ids), 2)
    ended = tokenise([*texts, Passage("you", ends=True)], model, None, encoder, tmp_path, 1)
    assert read_token_shard(ended.paths[0])[0].tolist() == [*first, encoder.eos, *second, encoder.eos]
    other = encoder._replace(encode=lambda batch: [[7] for _ in batch], digest="of another tokenizer")
    again = tokenise([*texts, Passage("you", ends=True)], model, None, other, tmp_path, 1)
    assert read_token_shard(again.paths[0])[0].tolist() == [7, encoder.eos, 7, encoder.eos]
    assert len({shards.digest, ended.digest, again.digest}) == 3
    assert set(tmp_path.iterdir()) == set(again.paths)  # what no longer counts is gone


def test_answers_in_tokens_are_kept_as_they_are(tmp_path: Path) -> None:
    """Without an end that was not said; other tokens are another corpus."""
    encoder = Encoder(lambda batch: [[1] * len(text) for text in batch], {str(i): i for i in range(9)}, 8, "")
    found = []
    for ids in ((3, 4, 8), (3, 4)):
        texts = [Passage("ab", ends=True), Passage("", ends=False, ids=ids), Passage("c", ends=False)]
        shards = tokenise(texts, "", None, encoder, tmp_path, 1)
        said, lengths = read_token_shard(shards.paths[0])
        assert said.tolist() == [1, 1, 8, *ids, 1]
        assert lengths.tolist() == [3, len(ids), 1]
        found.append(shards.digest)
    assert len({*found}) == 2


def test_ids_that_the_model_has_no_row_for_part_a_document(tmp_path: Path) -> None:
    """They are not counted, and no n-gram reaches over one, also where a document goes on."""
    encoder = Encoder(lambda batch: [[int(sign) for sign in text] for text in batch], {"last": 9}, None, "", rows=8)
    texts = [Passage("12983", False), Passage("94", False, True), Passage("5", False, True)]
    shards = tokenise(texts, "", None, encoder, tmp_path, 1)
    assert [document.tolist() for document in whole_documents(shards)] == [[1, 2], [], [3], [4, 5]]
    assert shards.digest != tokenise(texts, "", None, encoder._replace(rows=None), tmp_path, 1).digest


def test_documents_over_several_shards_are_whole(tmp_path: Path) -> None:
    """Of no token, of one shard, over two and over many, in shards of three passages."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(0, 9, rng.integers(0, 4)).tolist() for _ in range(60)]
    continues = [bool(number and rng.random() < 0.7) for number in range(60)]
    texts = [Passage(f"{number:010d}", False, goes_on) for number, goes_on in enumerate(continues)]
    encoder = Encoder(lambda batch: [parts[int(text)] for text in batch], {"last": 8}, None, "")
    shards = tokenise(texts, "", None, encoder, tmp_path, 1, shard=30)
    assert len(shards.paths) > 10 < sum(shards.continued) + 5
    documents: list[list[int]] = []
    for part, goes_on in zip(parts, continues, strict=True):
        if goes_on:
            documents[-1] = documents[-1] + part
        else:
            documents.append(part)
    assert [document.tolist() for document in whole_documents(shards)] == documents


@pytest.mark.slow
def test_no_process_outlives_a_killed_build(tmp_path: Path, model: str) -> None:
    script = (
        "import sys, time, multiprocessing, pathlib\n"
        "from outrider.data_prep.ngrams import token_shards\n"
        "from outrider.draft_models.targets.encoder import open_encoder\n"
        "folder, model = sys.argv[1:]\n"
        "def texts():\n"
        "    for _ in range(9):\n"
        "        yield token_shards.Passage('you there', True)\n"
        "    print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "    time.sleep(60)\n"
        "token_shards.tokenise(texts(), model, None, open_encoder(model, None), pathlib.Path(folder), 2, 5)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script, tmp_path, model], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert run.stdout is not None
    children = [psutil.Process(int(pid)) for pid in run.stdout.readline().split()]
    run.kill()
    run.wait()
    run.stdout.close()
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left
