"""The n-gram benchmarks on a small table: they count what the table counts, and fill in what they found."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from draft_models.ngrams.table import TrigramTable
from tests.data_prep.ngrams.corpora import sentences, train_pieces


def run(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def test_a_build_at_scale_counts_every_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_scale_ngrams

    from data_prep.ngrams import building

    for name in ("open_encoder", "read_records"):
        monkeypatch.setattr(building, name, getattr(building, name))  # what the benchmark changes is put back
    random = np.random.default_rng(0)
    documents = [random.integers(0, 30, random.integers(1, 200)).tolist() for _ in range(50)]
    TrigramTable.from_documents(documents, [2, 3], 30, "t", suffixes=True).save(tmp_path / "table")
    monkeypatch.setattr(bench_scale_ngrams, "_CHUNK", 1000)  # documents go over its ends
    first, second, *_ = (list(bench_scale_ngrams.records(tmp_path / "table", copies)) for copies in (1, 2))
    ids = [[ord(letter) - bench_scale_ngrams.FIRST for letter in record["text"]] for record in first]
    assert ids == documents
    assert second[: len(first)] == first
    before, after = ("".join(record["text"] for record in copy) for copy in (first, second[len(first) :]))
    changed = [a != b for a, b in zip(before, after, strict=True)]
    assert 0 < np.mean(changed) < 2 * bench_scale_ngrams.REPLACED
    arguments = ("--table", tmp_path / "table", "--copies", 3, "--work", tmp_path / "work", "--out", tmp_path)
    run(monkeypatch, bench_scale_ngrams, *arguments)
    found = json.loads((tmp_path / "ngram_scale.json").read_text())["results"]
    assert found["tokens"] == 3 * sum(map(len, documents))
    assert found["documents"] == 150
    whole = (tmp_path / "ngram_scale.json").read_bytes()
    run(monkeypatch, bench_scale_ngrams, *arguments[:2], "--copies", 1, "--parts", 3, *arguments[4:])
    both = json.loads((tmp_path / "ngram_scale.json").read_text())
    merging = both.pop("merging")
    assert both == json.loads(whole)
    assert {key: merging["results"][key] for key in ("tokens", "documents", "ngrams", "table_mb")} == {
        key: found[key] for key in ("tokens", "documents", "ngrams", "table_mb")
    }
    assert not (tmp_path / "work").exists()


def test_memory_is_measured_by_quarter_and_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_memory_ngrams
    import fill_tables

    from inference.evaluate.replay import load_vocabulary

    model = train_pieces(tmp_path / "pieces")
    vocabulary = load_vocabulary(model)
    documents = [vocabulary.encode(text) for text in sentences(20, seed=5)]
    size = 1 + max(max(document) for document in documents) + 60
    TrigramTable.from_documents(documents, [2, 3, 4], size, vocabulary.vocabulary_digest).save(tmp_path / "table")
    answer = sentences(1, seed=8)[0]
    lines = [{"question": text, "answer": f"{answer} {text}"} for text in sentences(8, seed=6)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ("--answers", tmp_path / "answers.jsonl", "--table", tmp_path / "table", "--tokenizer", model)
    run(monkeypatch, bench_memory_ngrams, *given, "--out", tmp_path)
    found = json.loads((tmp_path / "ngram_memory.json").read_text())["results"]
    for arms in found.values():
        assert [len(taus) for taus in arms.values()] == [4] * 4
        assert arms["kept, 64 MB"][-1] > 1.2 * arms["every text anew"][-1]
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- memory table: begin -->\nold\n<!-- memory table: end -->\nb\n")
    fill_tables.main([str(tmp_path / "ngram_memory.json"), str(page)])
    taus = " | ".join(f"{tau:.2f}" for tau in found["no table"]["every text anew"])
    assert f"| no table | every text anew | {taus} |" in page.read_text()
    assert "old" not in page.read_text()
    fill_tables.main([str(tmp_path / "ngram_memory.json"), str(page), "--check"])
