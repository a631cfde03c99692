"""An evaluation by several processes, or one that goes on where it was killed: the results of one process."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.base.errors import UserError
from outrider.draft_models.targets.attention import KernelChoice
from outrider.draft_models.targets.settings import TABLE
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.engines import packing
from outrider.inference.engines.cpu.at_once import LayersAtOnce
from outrider.inference.engines.graphs.attention_kernels import attention_shape
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.evaluate import measuring
from outrider.inference.loading import target_setup
from outrider.inference.measure.results import (
    MeasuredPrompt,
    append_line,
    append_result,
    read_results,
    seal_record,
    unseal_record,
)
from outrider.inference.report import building
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.settings.sampling import SamplingConfig
from tests.inference.evaluate.evaluating import (
    METHODS,
    QUESTIONS,
    evaluate,
    facts,
    killed_after,
    processes,
    refused,
    together,
    tokens,
)
from tests.tiny import LAYERS, save_exit

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize("then", [1, 3])
@pytest.mark.slow
def test_killed_and_resumed(alone: EvaluateConfig, config: Callable[..., EvaluateConfig], then: int) -> None:
    """By as many processes as there were, or more: the same generations, and what was finished is not done again."""
    made = config("killed")
    killed_after(made, 2)
    folder = Path(made.out_dir)
    assert not (folder / "report.json").exists()
    before = (folder / "results-00000.jsonl").read_bytes()
    prepared = json.loads((folder / "run.json").read_text())["prepared"]
    (folder / "results-00000.jsonl").write_bytes(before + before[:100])  # a third prompt, half written
    resumed = replace(made, resume=True)
    if then == 1:
        evaluate(resumed)
    else:
        assert together(resumed, then) == [0] * then
    assert tokens(made) == tokens(alone)
    assert list(tokens(made)) == list(tokens(alone))
    assert facts(made) == facts(alone)
    assert processes(made) == then
    assert (folder / "results-00000.jsonl").read_bytes() == before + before[:100]
    fresh = [json.loads(line)["position"] for path in folder.glob("results-*") if path.name != "results-00000.jsonl"
             for line in path.read_text().splitlines()]  # fmt: skip
    assert sorted(fresh) == [2, 3, 4]
    report = json.loads((folder / "report.json").read_text())["reports"][1]
    assert report["settings"] == prepared["methods"]["tree"]  # measured before the kill, and not again
    assert 0 < report["settings"]["structure"]["delta"] <= 1


@pytest.mark.slow
def test_a_finished_run_is_kept(alone: EvaluateConfig) -> None:
    """Resumed, it loads no target and writes the same report; without resume=true it is refused."""
    refused(alone, "holds results already; resume=true continues them, another out_dir keeps")
    before = tokens(alone)
    with patch.object(measuring, "load_models", None):
        evaluate(replace(alone, resume=True))
    assert tokens(alone) == before


def test_half_a_line_of_a_killed_run_is_no_part_of_the_next_one(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    append_line(file, {"a": 1})
    with file.open("ab") as torn:
        torn.write(b'{"a": 2, "b')
    append_line(file, {"a": 3})
    assert [unseal_record(json.loads(line))["a"] for line in file.read_text().splitlines()] == [1, 3]


@pytest.mark.slow
def test_other_settings_are_refused(alone: EvaluateConfig, models: Path, tiny_models: Path, tmp_path: Path) -> None:
    resumed = replace(alone, resume=True)
    fewer = {"chain": METHODS["chain"]}
    longer = {**METHODS, "chain": MethodConfig(stop=StopConfig(rule="fixed", max_draft=4))}
    save_exit(tmp_path / "other", models / "target", LAYERS - 1, noise=0.1)
    calibrated = shutil.copytree(models / "drafter", tmp_path / "calibrated")
    (calibrated / "calibration.json").write_text("{}")
    for changes, message in (
        ({"max_new_tokens": 11}, r"other settings: max_new_tokens=11 \(was 10\)"),
        ({"methods": longer}, r"methods.chain.stop.max_draft=4 \(was 3\)"),
        ({"methods": fewer}, r"methods\.tree=absent \(was given\); give the same ones"),
        ({"checkpoint": str(tmp_path / "other")}, r'settings: checkpoint="[0-9a-f]{16}" \(was "[0-9a-f]{16}"\)'),
        ({"dtype": "bfloat16"}, r'dtype="bfloat16" \(was "float32"\)'),
        ({"sampling": SamplingConfig(temperature=0.5)}, r"sampling.temperature=0.5 \(was 0.0\)"),
        ({"checkpoint": str(calibrated)}, r'calibration="[0-9a-f]{16}" \(was null\)'),
        ({"small_lm": str(models / "target")}, r"small_lm=given \(was null\)"),
        ({"table": str(tiny_models / TABLE)}, r'table="[0-9a-f]{16}" \(was null\)'),
    ):
        refused(replace(resumed, **changes), message)
    refused(resumed, r"settings: prompts=", QUESTIONS[:-1])


@pytest.mark.parametrize(
    "change", ["a layer in the middle", "rope_theta", "end tokens", "code", "transformers", "device"]
)
def test_another_target_code_or_device_under_a_run_is_refused(
    models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], change: str
) -> None:
    """One report is of one target and one program; the drafter, here none, need not notice. The target may be moved."""
    path = shutil.copytree(models / "target", tmp_path / "target")
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    made = config("made", checkpoint=None, target=str(path), methods=methods, resume=True)
    evaluate(made, QUESTIONS[:1])
    path, record = path.rename(tmp_path / "moved"), Path(made.out_dir) / "run.json"
    made = replace(made, target=str(path))
    evaluate(made, QUESTIONS[:1])
    if change == "a layer in the middle":
        stored = load_file(path / "model.safetensors")
        stored["model.layers.1.mlp.up_proj.weight"] += 0.1
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        named = r"target\.tensors\.model\.layers\.1="
    elif change == "rope_theta":
        stored = json.loads((path / "config.json").read_text())
        stored["rope_parameters"]["rope_theta"] = 5e5
        (path / "config.json").write_text(json.dumps(stored))
        named = r"target\.config\.rope_parameters\.rope_theta=500000.0 \(was 10000.0\)"
    elif change == "end tokens":
        (path / "generation_config.json").write_text('{"eos_token_id": [7]}')
        named = r"end_tokens=\[7\]"
    else:
        run = unseal_record(json.loads(record.read_text()))
        place = run["settings"] if change == "device" else run["settings"]["versions"]
        place[change] = "another"
        record.write_text(json.dumps(seal_record(run)))
        named = rf'{"" if change == "device" else "versions."}{change}="[^"]+" \(was "another"\)'
    before = {file.name: file.read_bytes() for file in Path(made.out_dir).glob("r*.json*")}
    refused(made, f"was made with other settings: {named}", QUESTIONS[:1])
    assert {file.name: file.read_bytes() for file in Path(made.out_dir).glob("r*.json*")} == before


@pytest.mark.slow
def test_kernels_are_chosen_once_for_a_run(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process measures them; a resumed run uses what it found, whatever it would find now."""
    used: list[Sequence[KernelChoice]] = []
    found = iter(["products", "fused", "fused"])
    prepare = Graphed.prepare

    def measured(_: object, stacks: Sequence[LayerStack], positions: int) -> tuple[KernelChoice, ...]:
        return (KernelChoice(*attention_shape(stacks[0]), 1, positions, next(found)),)

    def noted(runtime: Graphed, positions: int, choices: Sequence[KernelChoice]) -> None:
        used.append(tuple(choices))
        prepare(runtime, positions, choices)

    monkeypatch.setattr(Graphed, "choose_kernels", measured)
    monkeypatch.setattr(Graphed, "prepare", noted)
    made = config("kernels", runtime="graphed", compare_transformers=False)
    evaluate(made, QUESTIONS[:2])
    first = used[-1]
    assert [choice.kernel for choice in first] == ["products"]
    (results,) = Path(made.out_dir).glob("results-*.jsonl")
    results.write_bytes(results.read_bytes().splitlines(keepends=True)[0])
    evaluate(replace(made, resume=True), QUESTIONS[:2])
    assert used[-1] == first
    assert next(found) == "fused"  # nobody asked again


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False])
def test_a_clock_chooses_no_kernel_of_a_resumed_run(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Half of a run in bfloat16 with a clock that is for layers at once, or against; then the contrary."""
    ran: list[int] = []
    run = LayersAtOnce.run
    monkeypatch.setattr(LayersAtOnce, "run", lambda self, *given: ran.append(1) or run(self, *given))
    clock = [begun]
    monkeypatch.setattr(LayersAtOnce, "is_faster", lambda self, layers: clock[0])
    made = config("clocks", dtype="bfloat16", methods={"chain": METHODS["chain"]})
    evaluate(made, QUESTIONS[:2])
    whole, report = tokens(made), json.loads((Path(made.out_dir) / "report.json").read_text())
    assert bool(ran) == begun
    (results,) = Path(made.out_dir).glob("results-*.jsonl")
    results.write_bytes(results.read_bytes().splitlines(keepends=True)[0])
    ran.clear()
    clock[0] = not begun
    evaluate(replace(made, resume=True), QUESTIONS[:2])
    assert bool(ran) == begun
    assert tokens(made) == whole
    kernels = json.loads((Path(made.out_dir) / "report.json").read_text())["kernels"]
    assert kernels == report["kernels"]
    (layers,) = {name for name in kernels if name.startswith(f"{LAYERS} layers of")}
    assert kernels[layers] == ("at once" if begun else "one by one")
    assert f"<dt>{layers}</dt>" in (Path(made.out_dir) / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not packing.can_pack(torch.device("cpu"), torch.float32), reason="needs oneDNN")
def test_a_kernel_that_is_not_here_is_refused(
    config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, models: Path
) -> None:
    """A run that multiplied by blocked weights, resumed where these cannot be multiplied by."""
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    made = config("blocked", checkpoint=None, target=str(models / "target"), methods=methods)
    monkeypatch.setattr(packing, "find_fastest_layout", lambda linears, able: "blocked")
    evaluate(made, QUESTIONS[:1])
    (results,) = Path(made.out_dir).glob("results-*.jsonl")
    results.unlink()
    monkeypatch.setattr(packing, "can_pack", lambda *_: False)
    with pytest.raises(UserError, match=r"by the kernel 'blocked', which this machine does not have"):
        evaluate(replace(made, resume=True), QUESTIONS[:1])


@pytest.mark.slow
def test_processes_of_a_run_have_one_choice_of_kernels(config: Callable[..., EvaluateConfig]) -> None:
    """The first one's: the others are not asked."""

    def choose(rank: int) -> None:  # in a fork
        def is_faster(*_: object) -> bool:
            assert rank == 0
            return False

        LayersAtOnce.is_faster = is_faster  # type: ignore[method-assign]

    made = config("together", methods={"chain": METHODS["chain"]})
    assert together(made, 2, choose) == [0, 0]
    assert "one by one" in json.loads((Path(made.out_dir) / "report.json").read_text())["kernels"].values()


ROOT = Path(__file__).parents[3]


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


@pytest.mark.slow
def test_no_process_waits_for_one_that_failed(config: Callable[..., EvaluateConfig]) -> None:
    """What goes wrong on the main process is the same failure on all; one that is not lossless is everybody's."""
    used = config("used")
    Path(used.out_dir).mkdir()
    append_result(Path(used.out_dir), 0, MeasuredPrompt(0, 1, ()))
    assert together(used, 2) == [2, 2]

    def one_device(rank: int) -> None:  # in a fork
        target_setup.pick_device = lambda name: torch.device("cpu", 0)

    assert together(config("one_gpu"), 2, one_device) == [2, 2]

    def wrong(rank: int) -> None:
        building.method_verdict = lambda method, *_: "not lossless" if method == "tree" else "undecided"

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
            measuring.measure_talks = measure

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
