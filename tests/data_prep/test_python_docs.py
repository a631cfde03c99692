"""The command that writes prompts: two files that share no object, read by those they are for, kept and continued."""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.base.errors import UserError
from outrider.data_prep import python_docs
from outrider.data_prep.python_docs import FILES, TEMPLATES, questions, subjects
from outrider.data_prep.settings import PromptsConfig
from outrider.data_prep.text.prompts import Prompt, read_prompts
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import is_heldout, read_records

ROOT = Path(__file__).parents[2]


def write_prompts(config, modules="builtins shutil textwrap"):
    python_docs.write_prompts(config, modules)


@pytest.fixture
def config(tmp_path):
    return PromptsConfig(heldout_fraction=0.4, out_dir=str(tmp_path / "prompts"))


def written(config, name):
    return [json.loads(line) for line in (Path(config.out_dir) / name).read_text().splitlines()]


def test_both_files_are_there_with_a_record_of_them_and_share_no_object(config, capsys):
    write_prompts(config)
    record, printed = json.loads((Path(config.out_dir) / "prompts.json").read_text()), capsys.readouterr().out
    objects = {}
    for half in ("train", "heldout"):
        rows, about = written(config, f"{half}.jsonl"), record[half]
        assert about["prompts"] == len(rows) > 20
        assert f" {half}={len(rows)}" in printed
        assert about["categories"].keys() == TEMPLATES.keys()
        assert sum(about["categories"].values()) == len(rows)
        assert about["sha256"] == hashlib.sha256((Path(config.out_dir) / f"{half}.jsonl").read_bytes()).hexdigest()
        assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
        objects[half] = {name for row in rows for name in row["objects"]}
        assert {name.partition(".")[0] for name in objects[half]} > {"shutil", "textwrap"}
    assert all(is_heldout(name, 0.4) == (half == "heldout") for half, names in objects.items() for name in names)


def test_each_half_is_read_by_whom_it_is_for(config):
    write_prompts(config)
    folder = Path(config.out_dir)
    heldout = written(config, "heldout.jsonl")
    expected = [Prompt(row["id"], row["category"], tuple(row["turns"]), True) for row in heldout]
    assert read_prompts(str(folder / "heldout.jsonl")) == expected
    data = DataConfig(source="local", path=str(folder / "train.jsonl"), layout="prompts", heldout_fraction=0.0)
    records = list(read_records(data, "train", asking=True))
    said = [[message["content"] for message in record["messages"]] for record in records]
    assert said == [row["turns"] for row in written(config, "train.jsonl")]
    assert {message["role"] for record in records for message in record["messages"]} == {"user"}
    assert {len(turns) for turns in said} == {1, 2, 3}


def test_no_prompt_is_one_of_the_other_half_in_other_capitals(config, tmp_path, monkeypatch):
    lines = [f"def {name}{i}():\n    'Return the thing {i} of all {name} ones.'\n" for i in range(60) for name in "fF"]
    (tmp_path / "alike.py").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    write_prompts(config, "alike")
    train, heldout = ({row["turns"][0].lower() for row in written(config, f"{half}.jsonl")} for half in FILES)
    assert len(train) > len(heldout) > 20
    assert not train & heldout


def test_prompts_are_kept_or_refused_where_others_are(config, capsys):
    write_prompts(config)
    before = {path.name: path.read_bytes() for path in Path(config.out_dir).glob("[a-z]*")}
    with pytest.raises(UserError, match="holds a finished run"):
        write_prompts(config)
    write_prompts(replace(config, resume=True), "no_such_module")  # nothing is read again
    assert "finished already" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in Path(config.out_dir).glob("[a-z]*")} == before
    with pytest.raises(UserError, match=r"made with other settings: per_object=2 \(was 4\)"):
        write_prompts(replace(config, resume=True, per_object=2))


def test_what_is_said_is_clean():
    found = list(subjects(["builtins", "shutil", "textwrap", "json", "argparse"]))
    asked = [record for subject in found for record in questions(subject, len(TEMPLATES))]
    few = [record for subject in found for record in questions(subject, 2)]
    assert {record["category"] for record in few} == {record["category"] for record in asked} == TEMPLATES.keys()
    assert len(few) == 2 * len(found) < len(asked)
    for turn in (turn for record in asked for turn in record["turns"]):
        assert turn == turn.strip() != ""
        assert turn[0].isupper()
        assert turn[-1] in ".?!"
        assert turn.count("`") % 2 == 0
        assert not re.search(r"0x[0-9a-f]{4}|[{}]|(?<=\S) {2}|`_|(?<![\w.])_[a-z]|<\w+ ", turn), turn


def test_what_is_not_public_or_not_its_own_is_left_out_and_a_text_is_asked_about_once(tmp_path, monkeypatch):
    (tmp_path / "documented.py").write_text(
        "from textwrap import dedent\n"
        "def copy(value):\n    'Return the value as it is shown.'\n"
        "def shown(value):\n    'Return the value as it is shown.'\n"
        "def _hidden(value):\n    'Return the value as it is hidden.'\n"
        "def bare(value):\n    pass\n"
        "class Shop:\n"
        "    'A place where things are sold.'\n"
        "    def sell(self, thing, *, price=1):\n"
        "        'sell(thing) -> None\\n\\nSell one thing at a price.\\n\\n>>> Shop().sell(1)'\n"
        "    def _count(self):\n        'Count all the things that are left.'\n"
        "class Closed(Exception):\n    'The shop is closed on this day.'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {subject.name.removeprefix("documented."): subject for subject in subjects(["documented", "documented"])}
    assert {name: subject.error for name, subject in found.items()} == {
        "Closed": True, "Shop": False, "Shop.sell": False, "copy": False,
    }  # fmt: skip
    assert found["Shop.sell"].text == "Sell one thing at a price."


@pytest.mark.slow
def test_every_process_writes_the_same(tmp_path):
    """All that the command reads: ten thousand prompts, also with other orders of sets."""
    files = []
    for seed in ("1", "2"):
        command = [sys.executable, ROOT / "data_prep/write_prompts.py", f"out_dir={tmp_path / seed}"]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
        files.append({path.name: path.read_bytes() for path in (tmp_path / seed).glob("[a-z]*")})
    assert files[0] == files[1]
    rows = [json.loads(line) for name in ("train.jsonl", "heldout.jsonl") for line in files[0][name].splitlines()]
    assert len({tuple(row["turns"]) for row in rows}) == len(rows) >= 10_000
