import hashlib
import json
import os
import sysconfig
from pathlib import Path
from unittest.mock import patch

import datasets
import pytest
from omegaconf import OmegaConf

from outrider.base.errors import UserError
from outrider.base.files import user_cache
from outrider.data_prep.text.data_files import resolve_paths
from outrider.data_prep.text.records import Counts
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import content_digest, is_heldout, read_records

GROUP = Path(__file__).parents[3] / "conf" / "data"
ROWS = [{"text": f"line {i}"} for i in range(3)]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(path, split="train", counts=None, **values):
    values = {"heldout_fraction": 0.0, **values}
    return list(read_records(DataConfig(source="local", path=path, **values), split, counts))


def texts(path, **values):
    return [record["text"] for record in read(path, **values)]


def test_directories_globs_and_lists(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "a.py").write_text("a")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\xff")
    (tmp_path / "numbers.bin").write_bytes(b"\0\1\2")
    counts = Counts()
    assert [r["text"] for r in read(str(tmp_path), counts=counts)] == ["b", "a"]
    assert counts == {"records": 2, "unreadable": 2}
    assert texts(str(tmp_path / "**" / "*.py")) == ["a"]
    assert texts([str(tmp_path / "sub"), str(tmp_path / "*.txt"), str(tmp_path / "b.txt")]) == ["a", "b"]


def test_a_directory_of_responses_means_the_responses_alone(tmp_path):
    for name, content in (("responses-00000", "a"), ("responses-engine", "b"), ("skipped-00000", "no")):
        (tmp_path / f"{name}.jsonl").write_text(lines([{"text": content}]))
    (tmp_path / "summary.json").write_text("{}")
    assert len(resolve_paths([str(tmp_path)])) == 4  # any directory, so far
    (tmp_path / "run.json").write_text("{}")
    assert texts(str(tmp_path)) == ["a", "b"]


def test_the_split_is_disjoint_complete_and_the_same_for_copies(tmp_path):
    rows = [{"text": f"number {i % 150}"} for i in range(300)]
    (tmp_path / "a.jsonl").write_text(lines(rows))
    path = str(tmp_path / "a.jsonl")
    train = read(path, heldout_fraction=0.2)
    heldout = read(path, "heldout", heldout_fraction=0.2)
    assert len(train) + len(heldout) == 300
    assert train
    assert heldout
    assert not {r["text"] for r in train} & {r["text"] for r in heldout}
    assert {r["id"] for r in train} | {r["id"] for r in heldout} == {f"{path}:{i}" for i in range(1, 301)}


def test_the_split_is_fixed_for_good():
    """Values that must not change: a drafter's held-out text was chosen by them."""
    assert [i for i in range(40) if is_heldout(str(i), 0.1)] == [9, 39]
    assert all(is_heldout(str(i), 0.2) for i in (9, 39))
    assert 900 < sum(is_heldout(str(i), 0.1) for i in range(10_000)) < 1100
    assert not any(is_heldout(str(i), 0.0) for i in range(1000))


def test_the_digest_follows_the_content_and_not_the_name(tmp_path):
    def digest(name, content):
        (tmp_path / name).write_text(content)
        return content_digest(DataConfig(source="local", path=str(tmp_path / name)))

    assert digest("a.txt", "x") == digest("b.txt", "x")
    assert digest("a.txt", "x") != digest("a.txt", "y")
    assert digest("a.jsonl", '{"text": "x"}') != digest("a.txt", '{"text": "x"}')  # which is read in another way
    hub = {"source": "hub", "path": "a/b"}
    others = [{}, {"revision": "x"}, {"subset": "x"}, {"data_dir": "x"}, {"split": "x"}, {"path": "a/c"}]
    assert len({content_digest(DataConfig(**{**hub, **other})) for other in others}) == len(others)


def test_a_file_is_hashed_once_while_it_does_not_change(tmp_path):
    (file := tmp_path / "a.txt").write_text("x")
    os.utime(file, (0, 0))  # settled
    data = DataConfig(source="local", path=str(file))
    with patch("hashlib.file_digest", wraps=hashlib.file_digest) as hashed:
        digests = {content_digest(data) for _ in range(2)}
        assert hashed.call_count == len(digests) == 1
        file.write_text("longer")
        assert content_digest(data) not in digests


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DataConfig().cache == user_cache() == tmp_path / "outrider"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache() == Path.home() / ".cache" / "outrider"
    assert DataConfig(cache_dir="~/c").cache == Path.home() / "c"


def test_the_library_is_split_by_file():
    train, heldout = (list(read_records(DataConfig(), split)) for split in ("train", "heldout"))
    assert not {r["id"] for r in train} & {r["id"] for r in heldout}
    share = sum(len(r["text"]) for r in heldout) / sum(len(r["text"]) for r in train + heldout)
    assert 0.01 < share < 0.07
    assert {r["id"] for r in heldout} == {r["id"] for r in train + heldout if is_heldout(r["id"], 0.05)}


def test_packages_come_after_the_library_without_copies(tmp_path, monkeypatch):
    library, site = tmp_path / "lib", tmp_path / "lib/site-packages"
    monkeypatch.setattr(sysconfig, "get_path", lambda key: str(library if key == "stdlib" else site))
    for name, text in {
        "site-packages/a/one.py": "one",
        "site-packages/a/copy_of_ast.py": "ast",
        "site-packages/b/one_again.py": "one",
        "site-packages/b/tests/test_it.py": "test",
        "site-packages/b/data.json": "data",
        "ast.py": "ast",
        "json/ast.py": "ast",
    }.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(text)
    packages = DataConfig(packages=True, heldout_fraction=0)
    found = {r["id"]: r["text"] for r in read_records(packages, "train")}
    assert found == {"ast.py": "ast", "json/ast.py": "ast", "site-packages/a/one.py": "one"}
    assert [r["id"] for r in read_records(DataConfig(heldout_fraction=0), "train")] == ["ast.py", "json/ast.py"]
    digests = [content_digest(packages), content_digest(DataConfig())]
    (site / "a/one.py").write_text("two")  # and now b's file is no copy
    assert len({*digests, content_digest(packages)}) == 3
    assert len(list(read_records(packages, "train"))) == 4
    for fraction in (0.3, 0.6):  # what is held out does not depend on what else is read
        alone, both = (
            {r["id"] for r in read_records(DataConfig(packages=p, heldout_fraction=fraction), "heldout")}
            for p in (False, True)
        )
        assert alone == {name for name in both if not name.startswith("site-packages/")}


MESSAGES = [{"content": "q", "role": "user"}, {"content": "a", "role": "assistant"}]
HUB = {  # a record of each dataset, with its real columns
    "ultrachat": {"prompt": "q", "prompt_id": "f00", "messages": MESSAGES},
    "sharegpt": {"id": "Q_0", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "slimpajama": {"text": "prose", "meta": {"redpajama_set_name": "RedPajamaC4"}, "__index_level_0__": 7},
    "the_stack": {"hexsha": "0", "size": 5, "ext": "py", "lang": "Python", "content": "x = 1"},
}


@pytest.mark.parametrize("name", HUB)
def test_a_null_in_the_first_record_leaves_the_layout_to_the_next(tmp_path, name):
    nulls = dict.fromkeys(HUB[name].keys() & {"messages", "conversations", "text", "content"})
    path, counts = tmp_path / "a.jsonl", Counts()
    path.write_text(lines([{**HUB[name], **nulls}, HUB[name]]))
    assert [record["id"] for record in read(str(path), counts=counts)] == [f"{path}:2"]
    assert (counts["records"], counts["empty"]) == (1, 1)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """`load_dataset` over local files: the same builder code, minus the network."""
    load = datasets.load_dataset
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def serve(row, asked, copies=3):
        (tmp_path / "served.json").write_text(lines([row] * copies))

        def fake(path, *, split, streaming, **options):
            asked.update(path=path, split=split, **options)
            given = {"data_files": str(tmp_path / "served.json"), "cache_dir": str(tmp_path / "cache")}
            return load("json", split="train", streaming=streaming, **given)

        monkeypatch.setattr(datasets, "load_dataset", fake)

    return serve


@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize("streaming", [True, False])
def test_the_hub_datasets_are_read_in_their_own_layout(hub, name, streaming):
    asked = {}
    hub(HUB[name], asked)
    values = OmegaConf.to_container(OmegaConf.load(GROUP / f"{name}.yaml"))
    values |= {"streaming": streaming, "max_records": 2, "heldout_fraction": 0.0}
    config = DataConfig(**values)
    records = list(read_records(config, "train"))
    assert [record["id"] for record in records] == [f"{config.path[0]}/{config.split}:{i}" for i in (1, 2)]
    place = {"path": config.path[0], "name": None, "data_dir": config.data_dir, "revision": None}
    assert asked == {**place, "split": config.split}
    if config.layout in ("text", "code"):
        assert records[0]["text"] == HUB[name][config.column]
    else:
        assert [m["content"] for m in records[0]["messages"]] == ["q", "a"]


def test_what_cannot_be_had_from_the_hub_is_explained(tmp_path, monkeypatch):
    """A dataset that is not there, and one that breaks off while it is read."""
    monkeypatch.chdir(tmp_path)
    Path("broken").mkdir()
    Path("broken/train.jsonl").write_text(lines(ROWS) + '{"text": "cut')
    for path in ("./nowhere", "./broken"):
        with pytest.raises(UserError, match=rf"path={path}: cannot read split 'train' .*HF_TOKEN.*HF_HUB_OFFLINE"):
            list(read_records(DataConfig(source="hub", path=path), "train"))
