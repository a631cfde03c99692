"""JSON files that commands read and others write, damaged: each goes through, or ends with status 2 and one line that
names it.

What reads a file is called as the commands call it (`commands.ending.report_errors`).
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from outrider.base.files import require_writable
from outrider.commands.ending import report_errors
from outrider.data_prep.ngrams.token_shards import passages, tokenise
from outrider.data_prep.text.chat import render_prompt
from outrider.data_prep.text.prompts import read_prompts
from outrider.data_prep.text.rows import load_rows
from outrider.data_prep.text.settings import DataConfig
from outrider.data_prep.text.sources import read_records
from outrider.draft_models.calibration import load_calibration
from outrider.draft_models.early_exit.checkpoint import read_meta
from outrider.draft_models.ngrams.table import TABLE_FILE, TrigramTable, map_table
from outrider.draft_models.targets.encoder import open_encoder
from outrider.draft_models.targets.open_target import load_tokenizer, open_target
from outrider.draft_models.targets.settings import EARLY_EXIT, TABLE, TARGET
from outrider.inference.evaluate.planning import heldout_fraction, identity_of
from outrider.inference.loading.drafters import load_drafters
from outrider.inference.loading.models import load_models, load_reference
from outrider.inference.loading.target_setup import find_setup
from outrider.inference.measure.bench import make_bench
from outrider.inference.measure.prepared import Prepared
from outrider.inference.measure.recordings import read_transcripts
from outrider.inference.measure.results import seal_record, unseal_record
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from outrider.inference.shapes.shapes import read_shape
from tests.refusals import refusal
from tests.tiers import as_many

Keys = tuple[str | int, ...]  # where in a JSON file
VALUES: tuple[Any, ...] = (
    None, True, "", "x", "\ud800", -1, 0, 1, 2.5, 10**30, 1e308, float("nan"), float("inf"), [], {}, [None], ["x"],
    {"x": 1}, [[0]], "0", json.loads("[" * 200 + "]" * 200),
)  # fmt: skip


def mutants(content: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(what was done, the file) for damages to the bytes, and for `count` damages to the structure of a JSON file."""
    yield from _damaged_bytes(content)
    value, rng = json.loads(content), np.random.default_rng(seed)
    paths = list(_paths(value))
    whole = [(path, change) for path in paths for change in (*_CHANGES, *(_put(new) for new in VALUES))]
    for index in rng.permutation(len(whole))[:count]:
        path, (name, change) = whole[index]
        damaged = json.loads(content)
        change(_parent(damaged, path), path[-1])
        yield f"{'.'.join(map(str, path))}: {name}", json.dumps(damaged, indent=1).encode()


def require_named(file: Path, run: Callable[[], Any], capsys: pytest.CaptureFixture[str], count: int) -> None:
    """Damage `file` in many ways, one after the other, and `run` what reads it.

    count: damages to its structure, of which `make test` does a third.
    """
    whole, statuses = file.read_bytes(), set()
    run()
    for name, content in mutants(whole, as_many(count)):
        file.write_bytes(content)
        capsys.readouterr()
        status = 0
        try:
            with report_errors():
                run()
        except SystemExit as ended:
            status = ended.code
        except Exception as error:
            raise AssertionError(f"{file.name}, {name}: {type(error).__name__}: {error}") from error
        statuses.add(status)
        if status:
            errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert (status, len(errors)) == (2, 1), name
    file.write_bytes(whole)
    run()
    assert 2 in statuses


def _damaged_bytes(content: bytes) -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    for share in (0.1, 0.5, 0.9):
        yield f"cut at {share}", content[: int(share * len(content))]
    for size in (1, 40):
        yield f"cut by {size}", content[:-size]
    for text in ("null", "3", '"x"', "[]", "{}", "[null]", "NaN", "9" * 5000, "\0"):
        yield f"only {text[:9]!r}", text.encode()
    yield "200,000 brackets", b"[" * 200_000
    yield "200,000 closed brackets", b"[" * 200_000 + b"]" * 200_000
    yield "100,000 mappings", b'{"a":' * 100_000
    yield "900 brackets", b"[" * 900 + b"]" * 900
    yield "not UTF-8", content[: len(content) // 2] + b"\xff\xfe" + content[len(content) // 2 :]
    yield "UTF-16", content.decode().encode("utf-16")
    yield "Latin-1", '{"ä": "é"}'.encode("latin-1")
    yield "zeros", bytes(len(content))
    yield "two of it", content + content


def _paths(value: Any, path: Keys = ()) -> Iterator[Keys]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _parent(value: Any, path: Keys) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def _put(new: Any) -> tuple[str, Callable[[Any, Any], None]]:
    def put(parent: Any, key: Any) -> None:
        parent[key] = new

    return repr(new)[:40], put


def _delete(parent: Any, key: Any) -> None:
    del parent[key]


def _rename(parent: Any, key: Any) -> None:
    if isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    else:
        parent.insert(key, parent[key])


def _wrap(parent: Any, key: Any) -> None:
    parent[key] = [parent[key]]


_CHANGES = (("deleted", _delete), ("renamed", _rename), ("wrapped", _wrap))


@pytest.fixture
def folder(tmp_path: Path, tiny_models: Path) -> Path:
    """A copy of the models to damage."""
    return Path(shutil.copytree(tiny_models, tmp_path / "models"))


def on_target(folder: Path, **changes: Any) -> EvaluateConfig:
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    return EvaluateConfig(**{"target": str(folder / TARGET), "methods": methods, "max_new_tokens": 8, **changes})


def evaluate_shortly(config: EvaluateConfig) -> None:
    """An evaluation up to the first warm tokens of every arm."""
    setup = find_setup(config)
    ids = render_prompt(["to be or not to be"], setup.tokenizer, "none")
    drafters = load_drafters(config, setup.target, dtype=setup.dtype, device=setup.device)
    prepared = Prepared(config.methods, {})
    make_bench(config, setup, load_models(config, setup, drafters), prepared, ids, 1)


@pytest.mark.slow
def test_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_named(folder / TARGET / "config.json", lambda: evaluate_shortly(on_target(folder)), capsys, 20)


@pytest.mark.slow
def test_generation_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def read() -> None:
        config = on_target(folder)
        setup = find_setup(config)
        load_reference(setup.target, setup.dtype, setup.device)

    require_named(folder / TARGET / "generation_config.json", read, capsys, 50)


def test_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def read() -> None:
        tokenizer = load_tokenizer(str(folder / TARGET))
        render_prompt(["to be or not to be </s>"], tokenizer, "none")

    require_named(folder / TARGET / "tokenizer.json", read, capsys, 150)


def shard(folder: Path) -> Path:
    """The target's weights in several files; the index of them."""
    model = load_reference(open_target(str(folder / TARGET)), torch.float32, torch.device("cpu"))
    (folder / TARGET / "model.safetensors").unlink()
    model.save_pretrained(folder / TARGET, max_shard_size="200KB")
    return folder / TARGET / "model.safetensors.index.json"


@pytest.mark.slow
def test_index_of_safetensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = shard(folder)

    def read() -> None:
        setup = find_setup(on_target(folder))
        setup.target.layers(dtype=torch.float32)
        load_reference(setup.target, setup.dtype, setup.device)

    require_named(index, read, capsys, 50)


@pytest.mark.slow
def test_drafter(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / EARLY_EXIT / "drafter.json"
    meta = json.loads(file.read_text())
    part = {"source": "python_stdlib", "mix": {}, "heldout_fraction": 0.1}
    file.write_text(json.dumps({**meta, "training": {"data": {**part, "mix": {"a": part}}, "lr": 0.1}}))
    config = on_target(folder, checkpoint=str(file.parent), target=None, methods={"m": MethodConfig()})

    def read() -> None:
        heldout_fraction(config)
        setup = find_setup(config)
        load_drafters(config, setup.target, dtype=setup.dtype, device=setup.device)
        identity_of(config, setup, [])

    meta = read_meta(file.parent)
    file.write_text(file.read_text().replace(meta.fingerprint.target, str(folder / TARGET)))
    require_named(file, read, capsys, 150)
    file.write_text(json.dumps({**json.loads(file.read_text()), "parallel": 1}))
    refusal("parallel=1", read)


def test_calibration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sha256 = read_meta(folder / EARLY_EXIT).weights_sha256
    file = folder / EARLY_EXIT / "calibration.json"
    require_named(file, lambda: load_calibration(file.parent, sha256), capsys, 60)


def test_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, arrays = map_table(folder / TABLE)
    held, file = {name: array.copy() for name, array in arrays.items()}, folder / "header.json"
    file.write_text(json.dumps(asdict(header)))

    def read() -> None:
        save_file(held, folder / TABLE / TABLE_FILE, {"ngrams": file.read_text(errors="replace")})
        TrigramTable.open(folder / TABLE)

    require_named(file, read, capsys, 200)


PROMPTS = [{"question_id": 1, "category": "c", "turns": ["how", "are"]}, {"task_id": "a/1", "prompt": "def f"},
           {"question": "why"}, {"instruction": "do", "input": "it"}, {"text": "t"}]  # fmt: skip


def test_prompts(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(str(tiny_models / TARGET))
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps(PROMPTS))

    def read() -> None:
        for prompt in read_prompts(str(file)):
            print(prompt.id, prompt.category, render_prompt(prompt.turns[:1], tokenizer, "none"))

    require_named(file, read, capsys, 200)


RECORD = {"messages": [{"role": "user", "content": "how"}, {"role": "assistant", "content": "so"}], "id": "x"}


def test_training_text(tiny_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As rows and as passages of an n-gram table."""
    tokenizer = load_tokenizer(str(tiny_models / TARGET))
    encoder = open_encoder(str(tiny_models / TARGET), None)
    file, shards = tmp_path / "data.jsonl", require_writable(tmp_path / "shards")
    file.write_text(json.dumps(RECORD))
    data = DataConfig(
        source="local", path=str(file), template="vicuna", heldout_fraction=0.0, cache_dir=str(tmp_path / "cache")
    )  # fmt: skip

    def read() -> None:
        good = json.dumps(RECORD).encode() + b"\n"
        damaged = file.read_bytes()
        file.write_bytes(good + b" ".join(damaged.split(b"\n")) + b"\n")
        try:
            tokenise(
                passages(read_records(data, "train"), "all", encoder),
                str(tiny_models / TARGET),
                None,
                encoder,
                shards,
                1,
            )
            load_rows(data, tokenizer, 400, "train")
        finally:
            file.write_bytes(damaged)

    require_named(file, read, capsys, 40)


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


def test_what_is_sealed_is_not_changed_unnoticed() -> None:
    whole = seal_record({"tokens": [1, 2], "names": {"b", "a"}})
    assert unseal_record(whole) == {"tokens": [1, 2], "names": ["a", "b"]}
    for changed in ({**whole, "tokens": [1, 3]}, {**whole, "more": 1}, {"tokens": [1, 2]}, [whole]):
        refusal("sha256", unseal_record, changed)
