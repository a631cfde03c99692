"""Rows of token ids: packed, cached, and mixed of several sources."""

import json
import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.base.errors import UserError
from outrider.data_prep.text.documents import Document
from outrider.data_prep.text.rows import interleave, load_rows, pack, rows_of_sources
from outrider.data_prep.text.settings import DataConfig, MixPart
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.losses import IGNORE
from tests.forked import Fork
from tests.full_disk import largest_file

TEXTS = [{"text": f"def add(first, second):\n    return {i} + second\n" * (1 + i % 5)} for i in range(40)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def talk(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


@pytest.fixture
def data(tmp_path):
    def write(records, **values):
        (tmp_path / "data.jsonl").write_text(lines(records))
        values = {"cache_dir": str(tmp_path / "cache"), "heldout_fraction": 0.0, **values}
        return DataConfig(source="local", path=str(tmp_path / "data.jsonl"), **values)

    return write


def documents_of(lengths, indivisible):
    number = iter(range(1, 10**6))
    return [Document(np.array([next(number) for _ in range(n)]), np.ones(n, bool), indivisible) for n in lengths]


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 40), max_size=20), seq_len=st.integers(2, 17))
def test_text_fills_rows_without_a_gap_and_in_order(lengths, seq_len):
    packed = list(pack(documents_of(lengths, indivisible=False), seq_len))
    tokens = [token for segments in packed for segment in segments for token in segment.ids]
    assert tokens == list(range(1, sum(lengths) + 1))
    filled = [sum(len(segment.ids) for segment in segments) for segments in packed]
    assert all(n == seq_len for n in filled[:-1])
    assert all(0 < n <= seq_len for n in filled)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 16), max_size=60), seq_len=st.integers(16, 40), window=st.integers(1, 5))
def test_conversations_stay_whole_and_each_is_packed_once(lengths, seq_len, window):
    documents = documents_of(lengths, indivisible=True)
    packed = list(pack(documents, seq_len, window))
    found = sorted(segment.ids.tolist() for segments in packed for segment in segments)
    assert found == [document.ids.tolist() for document in documents]
    filled = [sum(len(segment.ids) for segment in segments) for segments in packed]
    assert all(n <= seq_len for n in filled)
    if window == 1:  # next-fit: two neighbouring rows cannot both be half empty
        assert all(a + b > seq_len for a, b in pairwise(filled))


def check_row(item, seq_len):
    """The contract of an item, by the slow and obvious definition."""
    ids, labels, positions, documents = (
        item[name].tolist() for name in ("input_ids", "labels", "positions", "documents")
    )
    assert all(item[name].dtype == torch.int64 and item[name].shape == (seq_len,) for name in item)
    assert any(label != IGNORE for label in labels)
    used = [d for d in documents if d >= 0]
    assert documents[: len(used)] == used == sorted(used)
    assert sorted(set(used)) == list(range(max(used) + 1))
    for t in range(seq_len):
        new = t == 0 or documents[t] != documents[t - 1]
        assert positions[t] == (0 if new else positions[t - 1] + 1)
        if documents[t] < 0:
            assert (ids[t], labels[t]) == (0, IGNORE)
        elif labels[t] != IGNORE:
            assert documents[t + 1] == documents[t]
            assert labels[t] == ids[t + 1]


def test_rows_of_text_keep_their_contract(data, tokenizer):
    rows = load_rows(data(TEXTS), tokenizer, 32, "train")
    stream = []
    for item in rows:
        check_row(item, 32)
        inside = item["documents"] >= 0
        stream += item["input_ids"][inside].tolist()
        same = item["documents"][1:] == item["documents"][:-1]
        assert (item["labels"][:-1][same & inside[1:]] != IGNORE).all()  # all of a text is supervised
    assert tokenizer.decode(stream) == "".join(row["text"] + "</s>" for row in TEXTS)
    assert rows.counts["tokens"] == len(stream)
    assert rows.counts["supervised"] == sum(int((item["labels"] != IGNORE).sum()) for item in rows)
    assert rows.counts["rows"] == len(rows)


def test_rows_of_conversations_supervise_the_answers(data, tokenizer):
    talks = [talk("Hello there", f"How are you? {i}", "add", f"return {i}") for i in range(30)]
    rows = load_rows(data(talks), tokenizer, 200, "train")
    answers = []
    for item in rows:
        check_row(item, 200)
        for d in range(int(item["documents"].max()) + 1):
            labels = item["labels"][item["documents"] == d]
            answers.append(tokenizer.decode(labels[labels != IGNORE]))
    assert sorted(answers) == sorted(f"How are you? {i}<|im_end|>return {i}<|im_end|>" for i in range(30))
    assert rows.counts["clipped"] == rows.counts["unsupervised"] == 0


def test_a_row_without_a_label_is_dropped(data, make_tokenizer):
    tokenizer = make_tokenizer(eos=False)
    (letter,) = tokenizer("x")["input_ids"]
    rows = load_rows(data([*([{"text": "x"}] * 4), {"text": "xxxxx"}]), tokenizer, 4, "train")
    assert rows.counts["dropped_rows"] == 2  # of four and of one single-token documents
    assert len(rows) == 1
    assert rows[0]["labels"].tolist() == [letter] * 3 + [IGNORE]


def entries(config):
    return sorted(path.name for path in (config.cache / "rows").iterdir() if path.suffix != ".lock")


def contents(rows):
    return [{name: tensor.tolist() for name, tensor in item.items()} for item in rows]


def test_a_second_load_reads_the_cache(data, tokenizer, capsys):
    config = data(TEXTS)
    first = load_rows(config, tokenizer, 32, "train")
    assert "tokenising into" in capsys.readouterr().out
    second = load_rows(config, tokenizer, 32, "train")
    assert "tokenising into" not in capsys.readouterr().out
    assert contents(first) == contents(second)
    assert first.key == second.key
    assert first.counts == second.counts


def test_an_entry_that_is_not_whole_is_rebuilt(data, tokenizer):
    config = data(TEXTS)
    expected = contents(load_rows(config, tokenizer, 32, "train"))
    (entry,) = entries(config)
    for name in ("rows.bin", "meta.json"):
        file = config.cache / "rows" / entry / name
        file.write_bytes(file.read_bytes()[:-7])
        assert contents(load_rows(config, tokenizer, 32, "train")) == expected
        assert entries(config) == [entry]


def test_the_key_is_all_that_determines_the_content(data, make_tokenizer):
    def key(records=TEXTS, seq_len=32, split="train", tokenizer=None, **values):
        return load_rows(data(records, **values), tokenizer or make_tokenizer(), seq_len, split).key

    keys = [
        key(),
        key(records=TEXTS[1:]),
        key(seq_len=33),
        key(heldout_fraction=0.3),
        key(heldout_fraction=0.3, split="heldout"),
        key(max_records=5),
        key(layout="text"),
        key(template="vicuna"),
        key(tokenizer=make_tokenizer(bos=True)),
        key(tokenizer=make_tokenizer(eos=False)),
        key(tokenizer=make_tokenizer(chat_template="{{ messages }}")),
        *(key(records=[{**row, "body": "x"} for row in TEXTS], column=column) for column in ("text", "body")),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_a_cache_that_cannot_be_written_is_named(data, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache_dir=.*file/x: cannot be written .*data.cache_dir=DIRECTORY"):
        load_rows(data(TEXTS, cache_dir=str(tmp_path / "file" / "x")), tokenizer, 32, "train")
    config = data(TEXTS)
    with largest_file(4096), pytest.raises(UserError, match=r"cannot be written \(File too large\); free space there"):
        load_rows(config, tokenizer, 32, "train")
    assert entries(config) == []


def test_max_rows_are_spread_and_survive_pickling(data, tokenizer):
    every = load_rows(data(TEXTS), tokenizer, 32, "train")
    some = load_rows(data(TEXTS), tokenizer, 32, "train", max_rows=4)
    assert contents(some) == [contents(every)[i * len(every) // 4] for i in range(4)]
    assert contents(pickle.loads(pickle.dumps(some))) == contents(some)
    assert len(load_rows(data(TEXTS), tokenizer, 32, "train", max_rows=10**6)) == len(every)


SCRIPT = """
import sys, time
from pathlib import Path
from transformers import AutoTokenizer
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
config = DataConfig(source="local", path=sys.argv[1], cache_dir=sys.argv[2], heldout_fraction=0.0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[3])
while not Path(sys.argv[4]).exists():
    time.sleep(0.01)
rows = load_rows(config, tokenizer, 32, "train")
print("key", rows.key, len(rows), sum(int(item["input_ids"].sum()) for item in rows))
"""


@pytest.mark.slow
def test_processes_that_start_together_build_once(data, tokenizer, tmp_path):
    config = data(TEXTS * 100)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = ["-c", SCRIPT, config.path[0], config.cache_dir, tmp_path / "tokenizer", tmp_path / "go"]
    both = [Fork(words) for _ in range(2)]
    (tmp_path / "go").touch()
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("tokenising into" in output for output in outputs) == 1
    results = [[line for line in output.splitlines() if line.startswith("key")] for output in outputs]
    assert results[0] == results[1] != []
    assert len(entries(config)) == 1


@pytest.fixture
def mix(tmp_path):
    """A mix of conversations (few of whose tokens are supervised) and plain text (all of whose tokens are)."""

    def write(name, records):
        (tmp_path / name).write_text(lines(records))
        return str(tmp_path / name)

    talks = write("talks.jsonl", [talk(f"Hello {i} " * 9, f"there {i}") for i in range(60)])
    texts = write("texts.jsonl", [{"text": f"def add(first, second): return {i}\n" * 3} for i in range(300)])

    def configure(weights=(1.0, 1.0), **values):
        parts = {
            "talks": MixPart(source="local", path=talks, weight=weights[0]),
            "texts": MixPart(source="local", path=texts, weight=weights[1]),
        }
        shared = {"heldout_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **values}
        return DataConfig(source="mix", mix=parts, **shared)

    return configure


def alone(config, name):
    """The source `name` of a mix by itself."""
    return next(part for part_name, _, part in config.parts() if part_name == name)


def supervised(rows):
    return sum(int((item["labels"] != IGNORE).sum()) for item in rows)


def ids_of(rows):
    return [tuple(item["input_ids"].tolist()) for item in rows]


def split_by_source(rows, config, tokenizer):
    """(rows of talks, rows of texts) among the rows of a mix."""
    talks = set(ids_of(load_rows(alone(config, "talks"), tokenizer, 128, "train")))
    return ([r for r in rows if tuple(r["input_ids"].tolist()) in talks],
            [r for r in rows if tuple(r["input_ids"].tolist()) not in talks])  # fmt: skip


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (0.2, 0.1)])
def test_sources_have_their_shares_of_the_supervised_tokens(mix, tokenizer, weights):
    config = mix(weights)
    rows = load_rows(config, tokenizer, 128, "train")
    talks, texts = split_by_source(rows, config, tokenizer)
    share = supervised(talks) / supervised(rows)
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.05)
    everything = [len(load_rows(alone(config, name), tokenizer, 128, "train")) for name in ("talks", "texts")]
    assert len(talks) == everything[0] or len(texts) == everything[1]  # as much as the shares allow
    assert max(Counter(ids_of(rows)).values()) == 1  # none twice
    assert rows.counts["rows"] == len(rows) == len(talks) + len(texts)
    assert rows.counts["supervised"] == pytest.approx(supervised(rows), rel=0.02)
    half = len(rows) // 2
    first = sum(tuple(r["input_ids"].tolist()) in set(ids_of(talks)) for r in [rows[i] for i in range(half)])
    assert first == pytest.approx(len(talks) / 2, abs=1)  # they take turns


def test_the_rows_are_a_function_of_sources_and_weights(mix, tokenizer, tmp_path):
    rows = load_rows(mix(), tokenizer, 128, "train")
    again = load_rows(mix(cache_dir=str(tmp_path / "other")), tokenizer, 128, "train")
    assert ids_of(again) == ids_of(rows)
    assert again.key == rows.key
    assert ids_of(pickle.loads(pickle.dumps(rows))) == ids_of(rows)
    few = load_rows(mix(), tokenizer, 128, "train", max_rows=5)
    assert ids_of(few) == [ids_of(rows)[i * len(rows) // 5] for i in range(5)]
    keys = {load_rows(config, tokenizer, 128, "train").key for config in (mix((1.0, 2.0)), mix((2.0, 1.0)), mix())}
    assert len(keys) == 3
    with (tmp_path / "talks.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    assert load_rows(mix(), tokenizer, 128, "train").key not in keys


def test_each_source_has_its_own_heldout_records(mix, tokenizer):
    config = mix(heldout_fraction=0.3)
    for name in ("talks", "texts"):
        part = alone(config, name)
        train, heldout = ([r["id"] for r in read_records(part, split)] for split in ("train", "heldout"))
        assert train
        assert heldout
        assert not {*train} & {*heldout}
    mixed = [r["id"] for r in read_records(config, "heldout")]
    assert mixed == [r["id"] for name in ("talks", "texts") for r in read_records(alone(config, name), "heldout")]
    assert len(load_rows(config, tokenizer, 128, "heldout"))


@settings(deadline=None)
@given(
    available=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    means=st.lists(st.floats(1, 100), min_size=4, max_size=4),
    weights=st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
)
def test_shares_never_exceed_what_there_is_and_exhaust_one_source(available, means, weights):
    count = len(available)
    labels = [round(rows * mean) for rows, mean in zip(available, means[:count], strict=True)]
    taken = rows_of_sources(available, labels, weights[:count])
    assert all(1 <= some <= rows for some, rows in zip(taken, available, strict=True))
    assert any(some == rows for some, rows in zip(taken, available, strict=True))
    given_each = [t * lab / rows / w for t, lab, rows, w in zip(taken, labels, available, weights, strict=False)]
    step = [lab / rows / w for lab, rows, w in zip(labels, available, weights, strict=False)]
    for i in range(count):  # equal up to one row, where rounding up to one row does not decide
        if all(some > 1 for some in taken):
            assert all(abs(given_each[i] - given_each[j]) <= (step[i] + step[j]) * 0.51 for j in range(count))
    order = interleave(taken, available)
    assert len({tuple(place) for place in order.tolist()}) == sum(taken)
    for source in range(count):
        own = order[order[:, 0] == source, 1]
        assert own.tolist() == [i * available[source] // taken[source] for i in range(taken[source])]  # evenly spread
