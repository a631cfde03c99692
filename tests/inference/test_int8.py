"""dtype=int8: the int8 model is the target of every arm, in every layout of its layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.base.streams import Streams
from outrider.data_prep.text.prompts import Prompt
from outrider.draft_models.targets.int8 import Int8Linear, quantise_rows
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.drafter import DraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.drafters.model_plugin import Calibrated
from outrider.inference.engines.cpu.at_once import PanelLinear
from outrider.inference.engines.cpu.recorded import can_pack
from outrider.inference.engines.cpu.vectors import PANEL
from outrider.inference.engines.fused_layers import join_linears
from outrider.inference.engines.packing import LAYOUTS, WidenedLinear, pack_linears
from outrider.inference.evaluate.evaluation import evaluate as command
from outrider.inference.loading import models, target_setup
from outrider.inference.loading.memory_plan import evaluation_memory
from outrider.inference.loading.models import make_runtime, prepare_models
from outrider.inference.measure.lossless import BULK
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.inference.shapes.factory import make_structure
from tests.inference.evaluate.evaluating import evaluate
from tests.tiny import LAYERS, STRUCTURES, make_drafter, method_of, random_prompt, reference_generate, save_target

CPU = torch.device("cpu")
TOKENS = 40


def coded(rows: int, columns: int, dtype: torch.dtype, bias: bool, seed: int = 0) -> Int8Linear:
    numbers = torch.Generator().manual_seed(seed)
    codes, scale = quantise_rows(torch.randn(rows, columns, generator=numbers), dtype)
    return Int8Linear(codes, scale, torch.randn(rows, generator=numbers).to(dtype) if bias else None)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layout_multiplies_by_the_same_numbers(layout: str, bias: bool, dtype: torch.dtype) -> None:
    """A slow reference of the dequantised weights, in float64."""
    layer = coded(48, 192, dtype, bias)
    if layout == "blocked" and not can_pack(CPU, dtype):
        pytest.skip("no kernel for it here")
    weight = layer.codes.double() * layer.scale.double()[:, None]
    rounded = 4 * torch.finfo(dtype).eps
    made = LAYOUTS[layout](layer)
    for shape in ((1, 1, 192), (1, 5, 192), (40, 192)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = x.double() @ weight.T + (0 if layer.bias is None else layer.bias.double())
        found = made(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=rounded, atol=rounded * float(expected.abs().max()))
    torch.testing.assert_close(made.weight.double(), weight, rtol=rounded, atol=0)


def test_layers_that_are_joined_go_on_as_parts() -> None:
    parts = [coded(rows, 32, torch.float32, bias=rows == 8, seed=rows) for rows in (16, 8, 8)]
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    before = torch.cat([part(x) for part in parts], -1)
    joined = join_linears(parts)
    assert torch.equal(joined(x), before)
    assert torch.equal(torch.cat([part(x) for part in parts], -1), before)
    assert {part.codes.untyped_storage().data_ptr() for part in parts} == {joined.codes.untyped_storage().data_ptr()}


@pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="needs oneDNN")
@pytest.mark.parametrize("wanted", LAYOUTS)
def test_only_layers_of_codes_have_their_layout(wanted: str) -> None:
    layer, other = coded(PANEL, 64, torch.float32, False), nn.Linear(64, PANEL)
    model = nn.Sequential(layer, other)
    pack_linears(model, lambda layers: wanted if isinstance(layers[0], Int8Linear) else "plain")
    kinds = {"plain": Int8Linear, "blocked": WidenedLinear, "panels": PanelLinear}
    assert [type(module) for module in model] == [kinds[wanted], nn.Linear]


# --- the target ---------------------------------------------------------------------------------------------------


def widened(path: Path) -> Any:
    """transformers' own model of the dequantised weights, made by a slow loop; it knows nothing of codes."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                for row in module.weight:
                    step = row.abs().max() / 127
                    row.copy_((row / step).round() * step)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A target whose int8 model says something else than its floats, and what the former says."""
    path = save_target(tmp_path_factory.mktemp("int8"), kv_heads=2)
    prompt = random_prompt(20)
    said = reference_generate(widened(path), prompt, TOKENS)
    assert said != reference_generate(AutoModelForCausalLM.from_pretrained(path).eval(), prompt, TOKENS)
    return path, said


@pytest.mark.parametrize(("source", "structure", "runtime"), [
    (None, None, "eager"),
    ("early_exit", "chain", "eager"),
    ("early_exit", "opt_tree", "graphed"),
    pytest.param("skip_layers", "k_config", "eager", marks=pytest.mark.slow),
])  # fmt: skip
def test_every_arm_decodes_the_int8_model(
    made: tuple[Path, list[int]], source: str | None, structure: str | None, runtime: str
) -> None:
    from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
    from outrider.inference.drafters.skip_layers.drafter import SkipLayersDraftModel

    path, said = made
    stack = open_target(str(path)).stack(dtype=torch.float32, int8=True)
    drafter = make_drafter(path, LAYERS - 1, noise=0.15, own_head=False)
    prepare_models(stack, {"early_exit": Calibrated(drafter)})
    options: dict[str, Any] = {"max_new_tokens": TOKENS, "runtime": make_runtime(runtime, CPU)}
    if source is None or structure is None:
        rounds = list(autoregressive(stack, random_prompt(20), **options))
    else:
        model: DraftModel = (
            EarlyExitDraftModel(drafter) if source == "early_exit" else SkipLayersDraftModel([LAYERS - 1])
        )
        shaped = ModelDrafter(model, make_structure(method_of(STRUCTURES[structure]), Streams(0)))
        rounds = list(speculative(stack, shaped, random_prompt(20), **options))
        assert sum(r.accepted for r in rounds) > 5
    assert [token for r in rounds for token in r.tokens] == said


# --- the command --------------------------------------------------------------------------------------------------


def config_for(path: Path, out: Path, **changes: Any) -> EvaluateConfig:
    methods = {
        "lookup": MethodConfig(source="prompt_lookup", stop=StopConfig(rule="fixed", max_draft=3)),
        "skip": MethodConfig(source="skip_layers", skip=(2,), stop=StopConfig(rule="fixed", max_draft=3)),
    }
    return EvaluateConfig(
        **{"target": str(path), "methods": methods, "max_new_tokens": 12, "device": "cpu", "threads": 1,
           "dtype": "int8", "out_dir": str(out), **changes}
    )  # fmt: skip


@pytest.mark.parametrize("floats", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_report_says_int8_and_an_arm_of_floats_is_found(
    made: tuple[Path, list[int]], tmp_path: Path, floats: torch.dtype
) -> None:
    """The fault: this runtime decodes the floats that transformers' int8 model is made from."""
    prompts = [Prompt("a", "code", ("def add(first, second):",), False)]
    faulty = lambda target, plain, dtype, device, **_: target.stack(dtype=dtype, device=device)  # noqa: E731
    with patch.object(target_setup, "pick_dtype", lambda *_: floats):
        evaluate(config_for(made[0], tmp_path / "right"), prompts)
        with patch.object(models, "load_stack", faulty), pytest.raises(SystemExit):
            evaluate(config_for(made[0], tmp_path / "wrong"), prompts)
    name = str(floats).removeprefix("torch.")
    for report in json.loads((tmp_path / "right/report.json").read_text())["reports"]:
        assert (report["dtype"], report["computes_in"]) == ("int8", name)
        assert report["lossless"]["identical"] + report["lossless"]["excused_ties"] == 1
        assert [judged["faults"] for judged in report["lossless"]["judged"].values()] == [[], []]
        assert all(judged["bulk"] < BULK for judged in report["lossless"]["judged"].values())
    said = (tmp_path / "right/report.md").read_text()
    assert f"int8 weights and {name} activations" in said
    assert "The target is the int8 model in all arms" in said
    for report in json.loads((tmp_path / "wrong/report.json").read_text())["reports"]:
        assert all(judged["faults"] for judged in report["lossless"]["judged"].values())


def test_a_plan_counts_a_byte_a_weight(
    made: tuple[Path, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, parts = config_for(made[0], tmp_path, plan=True, device="cuda"), {}
    for dtype in ("int8", "bfloat16"):
        parts[dtype] = evaluation_memory(replace(config, dtype=dtype), open_target(str(made[0])))
        command(replace(config, dtype=dtype))
        assert f" dtype={dtype} " in capsys.readouterr().out
    model = open_target(str(made[0])).layers(dtype=torch.bfloat16, int8=True)
    held = [*model.parameters(), *(b for m in model.modules() if isinstance(m, Int8Linear) for b in m.buffers())]
    assert sum(one.nbytes for one in held) == parts["int8"][0].size
    assert parts["int8"][1:] == parts["bfloat16"][1:]  # the caches are floats
    model = open_target(str(made[0])).layers(dtype=torch.bfloat16, device="meta", int8=True)  # has room for no floats
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
