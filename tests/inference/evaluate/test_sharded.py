"""Whole evaluations by several processes: the results of one."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from inference.evaluate import compare
from inference.measure import bench
from inference.measure.results import Measured, append_result, read_results
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import MethodConfig, StopConfig, StructureConfig
from inference.settings.sampling import SamplingConfig
from outrider.errors import UserError
from tests.inference.evaluate.evaluating import (
    METHODS,
    evaluate,
    facts,
    killed_after,
    processes,
    together,
    tokens,
)

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.slow
def test_two_processes_equal_one(alone: EvaluateConfig, config: Callable[..., EvaluateConfig]) -> None:
    made = config("two")
    assert together(made, 2) == [0, 0]
    assert tokens(made) == tokens(alone)
    assert list(tokens(made)) == list(tokens(alone))  # in the order of the prompts, whoever measured them
    assert facts(made) == facts(alone)
    assert [processes(alone), processes(made)] == [1, 2]
    shares = [[json.loads(line)["position"] for line in path.read_text().splitlines()]
              for path in sorted(Path(made.out_dir).glob("results-*"))]  # fmt: skip
    assert shares == [[0, 2, 4], [1, 3]]
    table = (Path(made.out_dir) / "report.md").read_text()
    assert "interleaved prompt by prompt, 2 processes at a time." in table
    assert "at a time" not in (Path(alone.out_dir) / "report.md").read_text()


@pytest.mark.parametrize("then", [1, 2])
@pytest.mark.slow
def test_what_was_left_out_is_known_to_the_report(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, then: int
) -> None:
    """Whichever process or run left it out: by name and reason, what was asked after it too."""
    for module in (compare, bench):  # second turns have 220 tokens and more
        monkeypatch.setattr(module, "context_length", lambda *_: 215)
    made = config("short", methods={"chain": METHODS["chain"]}, template="vicuna")
    killed_after(made, 2, monkeypatch)
    resumed = replace(made, resume=True)
    if then == 1:
        evaluate(resumed)
    else:
        assert together(resumed, then) == [0] * then
    report = json.loads((Path(made.out_dir) / "report.json").read_text())
    assert (report["prompts"], report["turns"]) == (5, 5)
    assert [left_out["prompt_id"] for left_out in report["skipped"]] == ["b/turn2", "d/turn2"]
    assert all(left_out["reason"].endswith("in a context of 215") for left_out in report["skipped"])
    assert "Left out: b/turn2 (" in (Path(made.out_dir) / "report.md").read_text()
    assert report["end_to_end"]["prompts"] == 5
    assert report["autoregressive"]["host_us"] > 0


@pytest.mark.slow
@pytest.mark.thorough
def test_sampled_texts_do_not_depend_on_who_measured(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, two, or one that was killed and three that went on: an id has its text."""
    methods = {
        "beta": MethodConfig(stop=StopConfig(rule="beta")),
        "tree": MethodConfig(structure=StructureConfig(kind="k_config", widths=(2, 2))),
    }
    options = {"methods": methods, "sampling": SamplingConfig(temperature=1.0), "seed": 3}
    one, two, killed = (config(name, **options) for name in ("one", "two", "killed"))
    evaluate(one)
    assert together(two, 2) == [0, 0]
    killed_after(killed, 2, monkeypatch)
    assert together(replace(killed, resume=True), 3) == [0, 0, 0]
    assert tokens(one) == tokens(two) == tokens(killed)


def test_one_run_at_a_time(config: Callable[..., EvaluateConfig]) -> None:
    made = config("locked")
    Path(made.out_dir).mkdir()
    with FileLock(Path(made.out_dir) / ".lock"):
        with pytest.raises(UserError, match="another run is writing results there"):
            evaluate(made)
        assert together(made, 2) == [2, 2]


@pytest.mark.slow
def test_no_process_waits_for_one_that_failed(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong on the main process is the same failure on all; one that is not lossless is everybody's."""
    used = config("used")
    Path(used.out_dir).mkdir()
    append_result(Path(used.out_dir), 0, Measured(0, 1, ()))
    assert together(used, 2) == [2, 2]
    one_gpu = config("one_gpu")
    pick = torch.device("cpu", 0)
    monkeypatch.setattr("inference.loading.targets.pick_device", lambda name: pick)
    assert together(one_gpu, 2) == [2, 2]
    monkeypatch.undo()

    def wrong(rank: int) -> None:
        compare.is_lossless = lambda report: report["method"] != "tree"

    assert together(config("wrong"), 2, wrong) == [1, 1]
    assert len(tokens(config("wrong"))) == 7 * 4


@pytest.mark.slow
def test_a_process_that_fails_in_its_share_ends_the_others(
    alone: EvaluateConfig, config: Callable[..., EvaluateConfig]
) -> None:
    """A launcher ends them at once, gloo when they wait for it; what was finished is there for the next run."""
    made = config("failed")

    def failing(rank: int) -> None:
        def measure(*_: object) -> None:
            raise UserError("this device is broken")

        if rank == 1:
            compare.measure_prompt = measure

    statuses = together(made, 2, failing)
    assert statuses[1] == 2
    assert statuses[0] != 0
    assert sorted(read_results(Path(made.out_dir))) == [0, 2, 4]
    assert together(replace(made, resume=True), 2) == [0, 0]
    assert list(tokens(made).items()) == list(tokens(alone).items())


@pytest.mark.slow
def test_the_command_under_a_launcher(models: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = ["-m", "accelerate.commands.launch", "--config_file=conf/accelerate/ddp.yaml", "--num_processes=2",
              f"--main_process_port={port}"]  # fmt: skip
    command = ["inference/evaluate_checkpoint.py", f"checkpoint={models / 'drafter'}", "method=eesd_fixed",
               "prompt_text=[one text,and another,a third]", "max_new_tokens=10", f"out_dir={tmp_path}"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, *launch, *command], env=environment, cwd=ROOT, timeout=300, check=False,
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["processes"], report["prompts"]) == (2, 3)
    assert report["lossless"]["identical"] == 3
    assert list(report["speedup_per_prompt"]) == ["inline:1", "inline:2", "inline:3"]
