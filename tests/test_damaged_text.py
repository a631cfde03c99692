"""Damaged text: prompts, records, cached rows, transcripts and the shape of a tree; see test_damaged_files.py."""

import json
from pathlib import Path

import pytest

from conf import reported
from data_prep.ngrams.token_shards import passages, tokenise
from data_prep.text.chat import render_prompt
from data_prep.text.prompts import read_prompts
from data_prep.text.rows import load_rows
from data_prep.text.settings import DataConfig
from data_prep.text.sources import read_records
from draft_models.targets.encoder import open_encoder
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.settings import TARGET
from inference.measure.replay import read_transcripts
from inference.shapes.shapes import read_shape
from outrider.files import require_writable
from tests.mutants import mutants, require_named

PROMPTS = [{"question_id": 1, "category": "c", "turns": ["how", "are"]}, {"task_id": "a/1", "prompt": "def f"},
           {"question": "why"}, {"instruction": "do", "input": "it"}, {"text": "t"}]  # fmt: skip


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_prompts(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    tokenizer = load_tokenizer(str(tiny_models / TARGET))
    file = tmp_path / f"prompts.{suffix}"
    file.write_text(json.dumps(PROMPTS if suffix == "json" else PROMPTS[0]) + "\n")

    def read() -> None:
        if suffix == "jsonl":
            file.write_bytes(b" ".join(file.read_bytes().split(b"\n")) + b"\n")
        for prompt in read_prompts(str(file)):
            print(prompt.id, prompt.category, render_prompt(prompt.turns[:1], tokenizer, "none"))

    require_named(file, read, capsys, 200)


TALK = {"conversations": [{"from": "human", "value": "how"}, {"from": "gpt", "value": "so"}], "id": "x"}
RECORDS = {
    "text": {"text": "to be or not to be", "meta": {"n": 1}},
    "sharegpt": TALK,
    "messages": {"messages": [{"role": "user", "content": "how"}, {"role": "assistant", "content": "so"}]},
    "alpaca": {"instruction": "do", "input": "it", "output": "done"},
    "turns": {"data": ["how", "so"]},
}


@pytest.mark.parametrize("layout", RECORDS)
def test_training_text(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    """As rows and as passages of an n-gram table."""
    tokenizer = load_tokenizer(str(tiny_models / TARGET))
    encoder = open_encoder(str(tiny_models / TARGET), None)
    file, shards = tmp_path / "data.jsonl", require_writable(tmp_path / "shards")
    file.write_text(json.dumps(RECORDS[layout]))
    data = DataConfig(
        source="local", path=str(file), template="vicuna", heldout_fraction=0.0, cache_dir=str(tmp_path / "cache")
    )  # fmt: skip

    def read() -> None:
        good = json.dumps(RECORDS[layout]).encode() + b"\n"
        damaged = file.read_bytes()
        file.write_bytes(good + b" ".join(damaged.split(b"\n")) + b"\n")
        try:
            tokenise(passages(read_records(data, "train"), "all"), str(tiny_models / TARGET), None, encoder, shards, 1)
            load_rows(data, tokenizer, 400, "train")
        finally:
            file.write_bytes(damaged)

    require_named(file, read, capsys, 40)


def test_cached_rows(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged entry is made again."""
    tokenizer = load_tokenizer(str(tiny_models / TARGET))
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "to be or not to be"}) + "\n")
    data = DataConfig(
        source="local", path=str(tmp_path / "data.jsonl"), heldout_fraction=0.0, cache_dir=str(tmp_path / "cache")
    )  # fmt: skip
    rows = load_rows(data, tokenizer, 32, "train")
    (file,) = (tmp_path / "cache").rglob("meta.json")
    for name, content in mutants(file.read_bytes(), 60):
        file.write_bytes(content)
        with reported():
            again = load_rows(data, tokenizer, 32, "train")
        assert len(again) == len(rows), name
        assert again[0]["input_ids"].tolist() == rows[0]["input_ids"].tolist(), name


def test_transcripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"question_id": 81, "choices": [{"index": 0, "turns": ["so", "and so"]}]}))

    def read() -> None:
        file.write_bytes(b" ".join(file.read_bytes().split(b"\n")))
        read_transcripts(str(file))

    require_named(file, read, capsys, 150)


def test_shape_of_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [1], [0, 0], [0, 1], [1, 0]]))
    require_named(file, lambda: read_shape(file), capsys, 150)
