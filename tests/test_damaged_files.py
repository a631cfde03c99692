"""Every JSON file that a command reads, damaged: it goes through, or ends with status 2 and one line that names it.

What reads a file is called as the commands call it (`conf.reported`); two commands are run as such, too.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file

from data_prep.responses.directory import answered, check_run, read_shard, summarise
from data_prep.text.chat import render_prompt
from draft_models.calibration import load_calibration
from draft_models.early_exit.checkpoint import read_meta
from draft_models.ngrams.table import TrigramTable
from draft_models.ngrams.table_files import TABLE_FILE, map_table
from draft_models.targets.open_target import load_tokenizer, open_target
from draft_models.targets.settings import EARLY_EXIT, TABLE, TARGET
from inference.loading.targets import (
    find_setup,
    heldout_fraction,
    load_drafters,
    load_models,
    load_plain,
    run_settings,
)
from inference.measure import bench
from inference.measure.results import append_result, begin_run, open_run, read_results
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import MethodConfig
from outrider.errors import UserError
from outrider.files import require_writable
from outrider.run_dirs import finished
from outrider.settings import construct
from tests.forked import Fork
from tests.inference.evaluate.test_prompt_results import measured
from tests.mutants import require_named
from tests.train.fit_job import TinyModel, tiny_config, tiny_rows
from train import pipeline_run
from train.core import run_dir
from train.core.fit import STATE_FILE, fit, read_state
from train.pipeline_run import run_pipeline
from train.pipeline_settings import STEPS, PipelineConfig, StepConfig


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
    prepared = bench.Prepared(config.methods, {})
    bench.make_bench(config, setup, load_models(config, setup, drafters), prepared, ids, 1)


# ----------------------------------------------------------------------------------------------- models


@pytest.mark.slow
def test_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_named(folder / TARGET / "config.json", lambda: evaluate_shortly(on_target(folder)), capsys, 20)


@pytest.mark.slow
def test_generation_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def read() -> None:
        config = on_target(folder)
        setup = find_setup(config)
        load_plain(setup.target, setup.dtype, setup.device)

    require_named(folder / TARGET / "generation_config.json", read, capsys, 50)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    def read() -> None:
        tokenizer = load_tokenizer(str(folder / TARGET))
        render_prompt(["to be or not to be </s>"], tokenizer, "none")

    require_named(folder / TARGET / name, read, capsys, 150)


def shard(folder: Path) -> Path:
    """The target's weights in several files; the index of them."""
    model = load_plain(open_target(str(folder / TARGET)), torch.float32, torch.device("cpu"))
    (folder / TARGET / "model.safetensors").unlink()
    model.save_pretrained(folder / TARGET, max_shard_size="200KB")
    return folder / TARGET / "model.safetensors.index.json"


@pytest.mark.slow
def test_index_of_safetensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = shard(folder)

    def read() -> None:
        setup = find_setup(on_target(folder))
        setup.target.layers(dtype=torch.float32)
        load_plain(setup.target, setup.dtype, setup.device)

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
        run_settings(config, setup, [])

    meta = read_meta(file.parent)
    file.write_text(file.read_text().replace(meta.fingerprint.target, str(folder / TARGET)))
    require_named(file, read, capsys, 150)


def test_calibration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sha256 = read_meta(folder / EARLY_EXIT).weights_sha256
    file = folder / EARLY_EXIT / "calibration.json"
    require_named(file, lambda: load_calibration(file.parent, sha256, hidden_size=64), capsys, 60)


def test_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, arrays = map_table(folder / TABLE)
    held, file = {name: array.copy() for name, array in arrays.items()}, folder / "header.json"
    file.write_text(json.dumps(asdict(header)))

    def read() -> None:
        save_file(held, folder / TABLE / TABLE_FILE, {"ngrams": file.read_text(errors="replace")})
        TrigramTable.open(folder / TABLE)

    require_named(file, read, capsys, 200)


# ------------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
def test_results_of_an_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin_run(tmp_path, {"seed": 0, "methods": {"m": 1}}, asdict(bench.Prepared({"m": MethodConfig()}, {})))
    append_result(tmp_path, 0, measured(0))

    def read() -> None:
        construct(bench.Prepared, open_run(tmp_path, {"seed": 0, "methods": {"m": 1}}, resume=True))
        assert set(read_results(tmp_path)) <= {0}

    require_named(tmp_path / "run.json", read, capsys, 100)
    file = tmp_path / "results-00000.jsonl"

    def as_lines() -> None:
        file.write_bytes(b" ".join(file.read_bytes().split(b"\n")) + b"\n")  # mutants are indented
        read()

    require_named(file, as_lines, capsys, 200)


@pytest.mark.slow
def test_responses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from data_prep.responses.directory import open_run as begin

    begin(tmp_path, {"seed": 0})
    talk = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "so"}]
    (tmp_path / "skipped-00000.jsonl").write_text('{"id": "p", "reason": "empty", "detail": ""}\n')
    file = tmp_path / "responses-00000.jsonl"
    record = {"id": "1", "messages": talk, "unanswered_turns": 0, "tokens": 2, "finish": "end"}
    file.write_text(json.dumps(record) + "\n")

    def read() -> None:
        for path in (file, tmp_path / "skipped-00000.jsonl"):
            path.write_bytes(b" ".join(path.read_bytes().split(b"\n")))
        check_run(tmp_path, {"seed": 0}, resume=True)
        answered(tmp_path)
        summarise(tmp_path)
        list(read_shard(file))

    require_named(tmp_path / "run.json", read, capsys, 20)
    require_named(file, read, capsys, 150)
    require_named(tmp_path / "skipped-00000.jsonl", read, capsys, 40)


@pytest.mark.slow
def test_a_training_and_its_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_dir = tmp_path / "run"

    def train(resume: bool = True) -> None:
        options = {"resume": resume, "identity": {"data": [1, {"seed": 0}]}, "evaluate": lambda *_: {"tau": 1.5}}
        fit(TinyModel(), tiny_rows(), tiny_config(steps=2, save_every=1), out_dir, **options)

    train(resume=False)
    finished, middle = (run_dir.checkpoints(out_dir)[i] for i in (-1, 0))
    require_named(finished / "run.json", train, capsys, 20)
    require_named(finished / STATE_FILE, train, capsys, 60)
    require_named(middle / STATE_FILE, lambda: read_state(middle), capsys, 100)
    shutil.rmtree(finished)
    (middle / STATE_FILE).write_text('{"step": "1"}')
    with pytest.raises(UserError, match=r"training_state\.json: damaged state of a training .*remove .*checkpoint-1"):
        train()
    (middle / STATE_FILE).unlink()
    with pytest.raises(UserError, match=r"training_state\.json: no readable state .*remove .*checkpoint-1"):
        train()


def test_the_report_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"settings": {"seed": 0, "data": {"path": ["x"]}}, "tau": 1.0}))
    same = {"seed": 0, "data": {"path": ["x"]}}
    require_named(
        tmp_path / "report.json", lambda: finished(tmp_path / "report.json", same, True, key="settings"), capsys, 60
    )


@pytest.mark.slow
def test_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> None:
        raise UserError("a step is run again")

    monkeypatch.setattr(pipeline_run, "_run_step", again)
    out_dir = require_writable(tmp_path / "run")
    config = PipelineConfig(steps={"target": StepConfig(), "report": StepConfig()}, out_dir=str(out_dir), resume=True)
    figures = {"tau": 2.0, "lossless": {"checked": 1}, "speedup": {"median": 1.0}, "tokens_per_second": {"a": 1.0}}
    figures |= dict.fromkeys(pipeline_run.FIGURES, 0) | figures
    products = {"target": {"parameters": 1, "steps": 2, "bits_per_byte": 3.0},
                "report": {"reports": [{"method": name, **figures} for name in "ab"]}}  # fmt: skip
    for number, (name, product) in enumerate(products.items()):
        made_from = {} if name == "target" else {"target": 0.0}
        record = pipeline_run.Record(config.options(name), 1.0, float(number), made_from)
        (out_dir / "logs").mkdir(exist_ok=True)
        (out_dir / "logs" / f"{name}.json").write_text(json.dumps(asdict(record)))
        path = out_dir / STEPS[name].product
        path.parent.mkdir()
        path.write_text(json.dumps(product))
        (path.parent / "report.md").write_text("# report")
    kept = Path(shutil.copytree(out_dir, tmp_path / "kept"))

    def run() -> None:
        try:
            run_pipeline(config)
        finally:
            for name in products:  # an outdated step's directory is cleared before it is run again
                if not (out_dir / name).exists():
                    shutil.copytree(kept / name, out_dir / name)

    for file in (out_dir / "logs/target.json", out_dir / "logs/report.json"):
        require_named(file, run, capsys, 60)
    for name in products:
        require_named(out_dir / STEPS[name].product, run, capsys, 60)


# ------------------------------------------------------------------------------------------------- commands


@pytest.mark.slow
def test_commands_end_with_status_2_and_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / EARLY_EXIT / "drafter.json").write_bytes(b"[" * 200_000)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "to be \ud800"}) + "\n")
    for options, said in (
        ([f"checkpoint={folder / EARLY_EXIT}"], "drafter.json: damaged drafter description (not valid JSON (nested"),
        ([f"target={folder / TARGET}", "method=prompt_lookup", f"prompts={prompts}"], "has a lone surrogate"),
    ):  # fmt: skip
        run = Fork(["inference/evaluate_checkpoint.py", *options, f"out_dir={tmp_path / 'out'}"])
        _, err = run.communicate()
        (line,) = (line for line in err.splitlines() if not line.startswith("progress: "))  # of a slow machine
        assert run.returncode == 2
        assert line.startswith("error: ")
        assert said in line
