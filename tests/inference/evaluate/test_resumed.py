"""An evaluation goes on where it was killed, and only if nothing that decides its results has changed."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_models.early_exit.checkpoint import save_pretrained
from draft_models.targets.architectures import load_config
from draft_models.targets.fingerprint import fingerprint_target
from draft_models.targets.open_target import load_tokenizer
from draft_models.targets.settings import TABLE
from draft_models.targets.stack import LayerStack
from draft_models.targets.tensor_files import open_tensors
from inference.core.target_session import KernelChoice
from inference.engines import packing
from inference.engines.cpu.at_once import LayersAtOnce
from inference.engines.graphs.attention_kernels import attention_shape
from inference.engines.graphs.cuda_graphs import Graphed
from inference.evaluate import compare
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import MethodConfig, StopConfig
from inference.settings.sampling import SamplingConfig
from outrider.errors import UserError
from tests.inference.evaluate.evaluating import (
    METHODS,
    QUESTIONS,
    evaluate,
    facts,
    killed_after,
    processes,
    together,
    tokens,
)
from tests.tiny import LAYERS, make_drafter, save_target

pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize("then", [1, 3])
@pytest.mark.slow
def test_killed_and_resumed(
    alone: EvaluateConfig,
    config: Callable[..., EvaluateConfig],
    monkeypatch: pytest.MonkeyPatch,
    then: int,
) -> None:
    """By as many processes as there were, or more: the same generations, and what was finished is not done again."""
    made = config("killed")
    killed_after(made, 2, monkeypatch)
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
def test_a_finished_run_is_kept(alone: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, it loads no target and writes the same report; without resume=true it is refused."""
    with pytest.raises(UserError, match="holds results already; resume=true continues them, another out_dir keeps"):
        evaluate(alone)
    before = tokens(alone)
    monkeypatch.setattr(compare, "load_models", None)
    evaluate(replace(alone, resume=True))
    assert tokens(alone) == before


@pytest.mark.slow
def test_other_settings_are_refused(
    alone: EvaluateConfig, models: Path, tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = replace(alone, resume=True)
    fewer = {"chain": METHODS["chain"]}
    longer = {**METHODS, "chain": MethodConfig(stop=StopConfig(rule="fixed", max_draft=4))}
    path = str(models / "target")
    fingerprint = fingerprint_target(open_tensors(path), load_config(path), load_tokenizer(path))
    other = make_drafter(Path(path), LAYERS - 1, noise=0.1)
    save_pretrained(tmp_path / "other", other, fingerprint, {}, torch.float32)
    calibrated = shutil.copytree(models / "drafter", tmp_path / "calibrated")
    (calibrated / "calibration.json").write_text("{}")
    monkeypatch.setattr(compare, "load_models", None)  # each is refused before the target's weights are read
    for changes, message in (
        ({"max_new_tokens": 11}, r"other settings: max_new_tokens=11 \(was 10\)"),
        ({"methods": longer}, r"methods.chain.stop.max_draft=4 \(was 3\)"),
        ({"methods": fewer}, r"methods\.tree=absent \(was given\); give the same ones"),
        ({"checkpoint": str(tmp_path / "other")}, r'settings: checkpoint="[0-9a-f]{16}" \(was "[0-9a-f]{16}"\)'),
        ({"dtype": "bfloat16"}, r'dtype="bfloat16" \(was "float32"\)'),
        ({"sampling": SamplingConfig(temperature=0.5)}, r"sampling.temperature=0.5 \(was 0.0\)"),
        ({"checkpoint": str(calibrated)}, r'calibration="[0-9a-f]{16}" \(was null\)'),
        ({"small_lm": path}, r"small_lm=given \(was null\)"),
        ({"table": str(tiny_models / TABLE)}, r'table="[0-9a-f]{16}" \(was null\)'),
    ):
        with pytest.raises(UserError, match=message):
            evaluate(replace(resumed, **changes))
    with pytest.raises(UserError, match=r"settings: prompts="):
        evaluate(resumed, QUESTIONS[:-1])
    monkeypatch.setattr("inference.loading.targets.describe_machine", lambda _: {"device": "another chip"})
    with pytest.raises(UserError, match=r'settings: device="cpu \(another chip\)" \(was "cpu \('):
        evaluate(resumed)


@pytest.mark.slow
def test_another_target_is_refused(
    models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known by its weights: it may lie elsewhere."""
    other, same = save_target(tmp_path / "other", seed=3), shutil.copytree(models / "target", tmp_path / "same")
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    made = config("made", checkpoint=None, target=str(models / "target"), methods=methods)
    evaluate(made, QUESTIONS[:1])
    monkeypatch.setattr(compare, "load_models", None)
    with pytest.raises(UserError, match=r'target.weights="[0-9a-f]{16}" \(was "[0-9a-f]{16}"\);'):
        evaluate(replace(made, target=str(other), resume=True), QUESTIONS[:1])
    evaluate(replace(made, target=str(same), resume=True), QUESTIONS[:1])
    (same / "generation_config.json").write_text('{"eos_token_id": [7]}')
    with pytest.raises(UserError, match=r"settings: end_tokens=\[7\]"):
        evaluate(replace(made, target=str(same), resume=True), QUESTIONS[:1])


@pytest.mark.parametrize("change", ["a layer in the middle", "rope_theta", "the code", "transformers"])
def test_a_target_or_code_that_was_changed_in_place_is_refused(
    models: Path, tmp_path: Path, config: Callable[..., EvaluateConfig], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """One report is of one target and one program; the drafter, here none, need not notice."""
    path = shutil.copytree(models / "target", tmp_path / "target")
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    made = config("made", checkpoint=None, target=str(path), methods=methods, resume=True)
    evaluate(made, QUESTIONS[:1])
    before = {file.name: file.read_bytes() for file in Path(made.out_dir).glob("r*.json*")}
    monkeypatch.setattr(compare, "load_models", None)
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
    elif change == "the code":
        monkeypatch.setattr("inference.loading.targets.code_version", lambda: "0.2+abc")
        named = r'versions\.code="0\.2\+abc" \(was "'
    else:
        monkeypatch.setattr("inference.loading.targets.transformers.__version__", "9.9")
        named = r'versions\.transformers="9\.9" \(was "'
    with pytest.raises(UserError, match=f"was made with other settings: {named}"):
        evaluate(made, QUESTIONS[:1])
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
    made = config("clocks", dtype="bfloat16", methods={"chain": METHODS["chain"]})
    monkeypatch.setattr(LayersAtOnce, "is_faster", lambda self, layers: begun)
    evaluate(made, QUESTIONS[:2])
    whole, report = tokens(made), json.loads((Path(made.out_dir) / "report.json").read_text())
    assert bool(ran) == begun
    (results,) = Path(made.out_dir).glob("results-*.jsonl")
    results.write_bytes(results.read_bytes().splitlines(keepends=True)[0])
    ran.clear()
    monkeypatch.setattr(LayersAtOnce, "is_faster", lambda self, layers: not begun)
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
    monkeypatch.setattr(packing, "fastest_layout", lambda linears, panels: "blocked")
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
