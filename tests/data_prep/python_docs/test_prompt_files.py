"""The command that writes prompts: two files with a record, read by those they are for, kept and continued."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data_prep.python_docs import prompt_files
from data_prep.python_docs.prompt_files import write_prompts
from data_prep.python_docs.settings import PromptsConfig
from data_prep.text.prompts import Prompt, read_prompts
from data_prep.text.settings import DataConfig
from data_prep.text.sources import read_records
from outrider.errors import UserError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_files, "STANDARD_LIBRARY", ("shutil", "textwrap"))
    return PromptsConfig(packages=("tqdm",), heldout_fraction=0.4, out_dir=str(tmp_path / "prompts"))


def written(config, name):
    return [json.loads(line) for line in (Path(config.out_dir) / name).read_text().splitlines()]


def recorded(config):
    return json.loads((Path(config.out_dir) / "prompts.json").read_text())


def test_both_files_are_there_with_a_record_of_them(config, capsys):
    write_prompts(config)
    record, printed = recorded(config), capsys.readouterr().out
    for half in ("train", "heldout"):
        rows, about = written(config, f"{half}.jsonl"), record[half]
        assert about["prompts"] == len(rows) > 20
        assert f" {half}={len(rows)}" in printed
        assert sum(about["categories"].values()) == len(rows)
        assert about["objects"] == len({name for row in rows for name in row["objects"]})
        assert about["sha256"] == hashlib.sha256((Path(config.out_dir) / f"{half}.jsonl").read_bytes()).hexdigest()
        assert {name.partition(".")[0] for row in rows for name in row["objects"]} > {"shutil", "textwrap", "tqdm"}
    assert record["left_out"] == {}
    assert record["made_of"]["versions"].keys() == {"tqdm"}


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


def test_prompts_are_kept_or_refused_where_others_are(config, capsys, monkeypatch):
    write_prompts(config)
    before = {path.name: path.read_bytes() for path in Path(config.out_dir).glob("[a-z]*")}
    with pytest.raises(UserError, match="holds a finished run"):
        write_prompts(config)
    monkeypatch.setattr(prompt_files, "read_subjects", None)  # nothing is read again
    write_prompts(replace(config, resume=True))
    assert "finished already" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in Path(config.out_dir).glob("[a-z]*")} == before
    with pytest.raises(UserError, match=r"made with other settings: per_object=2 \(was 4\)"):
        write_prompts(replace(config, resume=True, per_object=2))


def test_a_run_that_did_not_end_is_made_again(config):
    write_prompts(config)
    folder = Path(config.out_dir)
    whole = (folder / "train.jsonl").read_bytes()
    (folder / "prompts.json").unlink()
    (folder / "train.jsonl").write_bytes(whole[:100])
    write_prompts(replace(config, resume=True))
    assert (folder / "train.jsonl").read_bytes() == whole


def test_a_package_that_is_missing_or_broken_is_left_out_and_said(config, capsys, monkeypatch):
    monkeypatch.setattr(prompt_files, "find_spec", lambda name: None if name == "yaml" else name)
    monkeypatch.setattr(prompt_files, "PACKAGES", {"tqdm": ("tqdm.no_such_module",)})
    write_prompts(replace(config, packages=("tqdm", "yaml")))
    printed = capsys.readouterr().out
    assert "yaml is not installed; nothing is asked about it" in printed
    assert "tqdm.no_such_module is left out, it cannot be imported (ModuleNotFoundError" in printed
    assert list(recorded(config)["left_out"]) == ["tqdm.no_such_module"]
    assert recorded(config)["made_of"]["versions"].keys() == {"tqdm"}


def test_a_package_without_a_list_of_modules_is_refused():
    with pytest.raises(UserError, match="packages='flask': expected one of torch, numpy"):
        PromptsConfig(packages=("numpy", "flask"))


@pytest.mark.slow
@pytest.mark.thorough
def test_there_are_twenty_thousand(tmp_path):
    """All that the command reads."""
    command = [sys.executable, ROOT / "data_prep/write_prompts.py", f"out_dir={tmp_path / 'out'}"]
    subprocess.run(command, cwd=ROOT, check=True)
    halves = [
        [json.loads(line) for line in (tmp_path / "out" / name).read_text().splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    ]
    rows = halves[0] + halves[1]
    assert len({tuple(row["turns"]) for row in rows}) == len(rows) >= 20_000
    objects = [{name for row in half for name in row["objects"]} for half in halves]
    assert not objects[0] & objects[1]
    assert not any(" at 0x" in turn for row in rows for turn in row["turns"])


@pytest.mark.slow
def test_every_process_writes_the_same(tmp_path):
    """Processes whose sets have other orders; of part of the standard library and one package."""
    code = """
import sys
from data_prep.python_docs import prompt_files
from data_prep.python_docs.settings import PromptsConfig
prompt_files.STANDARD_LIBRARY = ("shutil", "textwrap", "logging")
prompt_files.write_prompts(PromptsConfig(packages=("tqdm",), out_dir=sys.argv[1]))
"""
    files = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", code, tmp_path / seed]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True)
        files.append({path.name: path.read_bytes() for path in (tmp_path / seed).glob("[a-z]*")})
    assert files[0] == files[1]
    assert "train.jsonl" in files[0]
