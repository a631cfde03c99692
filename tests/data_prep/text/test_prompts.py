import json
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from outrider.base.errors import UserError
from outrider.data_prep.settings import PromptsConfig
from outrider.data_prep.text.prompt_records import to_prompt
from outrider.data_prep.text.prompts import Prompt, read_prompts
from outrider.data_prep.text.settings import BENCHMARKS, DataConfig, RecordFile
from outrider.data_prep.text.sources import is_heldout, python_files
from outrider.inference.batch.own_prompts import write_prompts
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from tests.refusals import refusal


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ENGLISH = "Translate the input English sentence into"
LAYOUTS = {  # in the columns that the datasets have, and the prompts that become of them
    "mt_bench": ({"prompt": ["a", "b"], "prompt_id": 81, "category": "writing", "reference": []},
                 Prompt("81", "writing", ("a", "b"), True)),
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, Prompt("1", "question", ("How many?",), True)),
    "humaneval": ({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": ""},
                  Prompt("HumanEval/0", "code", ("def f():\n",), False)),
    "alpaca": ({"instruction": "Sort.", "input": "3 1", "output": "1 3", "text": "Below"},
               Prompt("1", "instruction", ("Sort.\n\n3 1",), True)),
    "cnn_dm": ({"article": "It rained.", "highlights": "Rain.", "id": "f0"},
               Prompt("f0", "summary", ("Summarize: It rained.",), True)),
    "xsum": ({"document": "It rained.", "summary": "Rain.", "id": "7"},
             Prompt("7", "summary", ("Summarize this article in one sentence.\n\nIt rained.",), True)),
    "wmt": ({"translation": {"de": "Regen.", "en": "Rain."}},
            Prompt("1", "translation", (f"{ENGLISH} German.\nInput: Rain.\nOutput: ",), True)),
    "spec_bench": ({"question_id": 81, "category": "writing", "turns": ["first", "second"]},
                   Prompt("81", "writing", ("first", "second"), True)),
    "speed_bench": ({"question_id": "9f", "category": "rag", "sub_category": "single", "turns": ["q"], "src_id": "1"},
                    Prompt("9f", "rag", ("q",), True)),
    "no category": ({"question_id": 0, "category": "", "turns": ["q"]}, Prompt("0", "question", ("q",), True)),
    "no input": ({"instruction": "Sing.", "input": "", "output": "la"}, Prompt("1", "instruction", ("Sing.",), True)),
    "system": ({"system": "Be brief.", "turns": ["q", "r"]}, Prompt("1", "question", ("q", "r"), True, "Be brief.")),
    "history": ({"instruction": "b", "history": [["a", "A"]], "system_prompt": "s", "output": "B"},
                Prompt("1", "instruction", ("a", "b"), True, "s")),
    "sharegpt": ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "A"}], "system": "s"},
                 Prompt("1", "chat", ("a",), True, "s")),
    "messages": ({"prompt": "a", "tools": "[]", "messages": [
                    {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
                    {"role": "assistant", "content": "A"}, {"role": "user", "content": "b"}]},
                 Prompt("1", "chat", ("a", "b"), True, "s")),
    "trl": ({"prompt": [{"role": "user", "content": "a"}]}, Prompt("1", "chat", ("a",), True)),
    "prompt": ({"prompt": "Once"}, Prompt("1", "text", ("Once",), False)),
    "text": ({"id": "x", "text": "Once"}, Prompt("x", "text", ("Once",), False)),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_told_by_their_columns(tmp_path, layout):
    row, expected = LAYOUTS[layout]
    assert read_prompts(write(tmp_path / "p.jsonl", [row])) == [expected]


@pytest.mark.parametrize(
    "given",
    [("a", "a", "a#2"), ("a#2", "a", "a"), ("a", "a#2", "a", "a", "a#3"), ("a+", "a/turn1"), ("a/turn2", "a+"),
     ("a+", "a+", "a#2/turn1"), ("a+", "a"), ("a/turn1", "a+", "a#2/turn2", "a#3")],
    ids=" ".join,
)  # fmt: skip
def test_no_two_prompts_or_turns_have_one_name(tmp_path, given):
    """Whatever ids the file has, also those that renaming or counting turns would make; + marks two turns."""
    rows = [
        {"question_id": name.rstrip("+"), "turns": [str(place), "b"][: 1 + name.endswith("+")]}
        for place, name in enumerate(given)
    ]
    prompts = read_prompts(write(tmp_path / "p.jsonl", rows))
    names = [name for prompt in prompts for name in {prompt.id, *prompt.turn_ids}]
    assert len(set(names)) == len(names)
    assert [prompt.turns[0] for prompt in prompts] == [str(place) for place in range(len(given))]
    first = prompts[0]
    assert first.id == given[0].rstrip("+")
    assert all(p.id.startswith(name.rstrip("+")) for p, name in zip(prompts, given, strict=True))


def test_a_limit_is_spread_and_balanced(tmp_path):
    sizes = {"a": 10, "b": 50, "c": 2}
    rows = [{"question_id": f"{c}{i}", "category": c, "turns": ["q"]} for c, n in sizes.items() for i in range(n)]
    path = write(tmp_path / "p.jsonl", rows)
    chosen = read_prompts(path, limit=14)
    assert Counter(p.category for p in chosen) == {"a": 6, "b": 6, "c": 2}
    assert [p.id for p in chosen if p.category == "b"] == ["b0", "b8", "b16", "b25", "b33", "b41"]
    assert chosen == read_prompts(path, limit=14)
    order = [p.id for p in read_prompts(path)]
    assert [p.id for p in chosen] == sorted((p.id for p in chosen), key=order.index)
    assert len(read_prompts(path, limit=1000)) == 62


def fetched(cache, name, *rows):
    """The Hub's cache with a file of these rows, as a download of the benchmark leaves it; no network is asked then."""
    dataset, commit, file = BENCHMARKS[name]
    path = cache / f"datasets--{dataset.replace('/', '--')}" / "snapshots" / commit / file
    path.parent.mkdir(parents=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([*rows]), path)
    else:
        write(path, rows)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_by_name(cache, name):
    """One file at one commit, fetched once; a local file of that name is read instead."""
    dataset, commit, _ = BENCHMARKS[name]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    said = rf"^prompts={name}: cannot be fetched .*; download https://.*{dataset}/resolve/{commit}/.* prompts=FILE"
    refusal(said, read_prompts, name)
    row, prompt = LAYOUTS[name]
    fetched(cache, name, row)
    assert read_prompts(name) == [prompt]
    EvaluateConfig(target="t", methods={"m": MethodConfig("prompt_lookup")}, prompts=name).require_paths(
        lambda key: key == "prompts"
    )
    Path(name).write_text("mine")
    assert read_prompts(name) == [Prompt("0", "text", ("mine",), False)]


def test_a_benchmark_is_parted_for_training(cache):
    with pytest.raises(UserError, match=r"^file=mt_bench: cannot be fetched .* file=FILE"):
        write_prompts(PromptsConfig(file="mt_bench", out_dir="prompts"))
    fetched(cache, "mt_bench", *({"question_id": i, "prompt": [f"a{i}"]} for i in range(30)))
    write_prompts(PromptsConfig(file="mt_bench", out_dir="prompts"))
    assert [len(read_prompts(f"prompts/{split}.jsonl")) for split in ("train", "heldout")] == [18, 12]


def test_library_prompts_are_beginnings_of_heldout_files():
    prompts = read_prompts("python_stdlib")
    sources = {name: path.read_text() for name, path in python_files(packages=False)}
    assert len(prompts) >= 15
    for prompt in prompts:
        name, _, line = prompt.id.rpartition(":")
        (text,) = prompt.turns
        assert line == "1"
        assert is_heldout(name, DataConfig.heldout_fraction)
        assert sources[name].startswith(text)
        assert len(sources[name]) >= 2000  # as much again to continue with
        assert text.endswith("\n")
        assert 500 < len(text) <= 1000
        assert not prompt.chat


def test_library_prompts_go_on_inside_the_files_only_when_asked_for_more():
    one_each = read_prompts("python_stdlib")
    fewer = read_prompts("python_stdlib", limit=5)
    assert len(fewer) == 5
    assert set(fewer) < set(one_each)
    more = read_prompts("python_stdlib", limit=len(one_each) + 8)
    assert len(more) == len(set(more)) == len(one_each) + 8
    assert set(one_each) < set(more)
    sources = {name: path.read_text() for name, path in python_files(packages=False)}
    for prompt in more:
        name, _, line = prompt.id.rpartition(":")
        assert "".join(sources[name].splitlines(keepends=True)[int(line) - 1 :]).startswith(prompt.turns[0])


def test_a_file_is_judged_by_its_first_prompt_that_can_be_asked(tmp_path):
    """Others are counted and left out when it is read. Without any, the first one's fault is told."""
    file = tmp_path / "prompts.jsonl"
    only_system = {"messages": [{"role": "system", "content": "x"}]}
    file.write_text("".join(json.dumps(record) + "\n" for record in (only_system, {"turns": ["so"]})))
    RecordFile("prompts", check=to_prompt).require("prompts", str(file))
    assert [prompt.turns for prompt in read_prompts(str(file))] == [("so",)]
    file.write_text(json.dumps(only_system) + "\n")
    place = RecordFile("prompts", check=to_prompt)
    refusal(r"no record in it that can be used, the first of them at .*:1: ", place.require, "prompts", str(file))


def test_a_file_that_may_not_be_read_is_told_as_such(tmp_path, monkeypatch):
    (file := tmp_path / "prompts.jsonl").write_text('{"turns": ["so"]}')
    monkeypatch.setattr("os.access", lambda *_: False)
    for path in (file, tmp_path):
        refusal("this user may not read it", RecordFile("prompts").require, "prompts", str(path))
