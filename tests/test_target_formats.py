"""Every command takes a target in a GGUF or .bin file: what is trained for it decodes losslessly with it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from outrider.base.errors import UserError
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.checkpoint import read_meta
from outrider.draft_models.targets.open_target import open_target
from outrider.inference.batch.generate import generate_responses
from outrider.inference.batch.settings import GenerateConfig
from outrider.inference.engines.cpu.at_once import PanelLinear
from outrider.inference.engines.fused_layers import frozen_linear
from outrider.inference.engines.packing import multiply_by_codes
from outrider.inference.evaluate.evaluation import evaluate as plan_evaluation
from outrider.inference.loading.models import prepare_models
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig, StopConfig
from outrider.train.eagle3 import train_eagle3
from outrider.train.eesd import train_early_exit
from outrider.train.finetune_drafter import finetune_drafter
from outrider.train.parts.heldout import packed_hidden
from tests.draft_models.formats.test_torch_files import as_bin
from tests.gguf_files import save_plain_target, write_gguf
from tests.inference.batch.responding import read_responses
from tests.inference.evaluate.evaluating import QUESTIONS, evaluate
from tests.tiny import reference_generate
from tests.train.jobs import distilling, finetuning, heading, write_corpus

FORMATS = ("gguf", "bin")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    plain = save_plain_target(folder / "plain")
    return {
        "plain": plain,
        "gguf": write_gguf(plain, folder / "model.gguf", "Q8_0"),
        "gguf Q4_0": write_gguf(plain, folder / "other.gguf", "Q4_0"),
        "bin": as_bin(plain, folder / "bin"),
    }


def test_heads_learn_from_products_with_the_stored_codes(targets: dict[str, Path]) -> None:
    """Of two packed texts; the states are those of the decoded weights."""
    opened = open_target(str(targets["gguf Q4_0"]))
    decoded, coded = (opened.stack(dtype=torch.float32, coded=coded) for coded in (False, True))
    multiply_by_codes(coded)
    assert sum(isinstance(module, PanelLinear) for module in coded.layers.modules()) == 4 * len(coded.layers)
    documents, positions = torch.tensor([[0] * 7 + [1] * 9]), torch.tensor([[*range(7), *range(9)]])
    states = [packed_hidden(stack, positions + 3, positions, documents) for stack in (decoded, coded)]
    torch.testing.assert_close(states[1], states[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(coded.head.weight, decoded.head.weight)


def test_a_layer_may_have_codes_and_floats(targets: dict[str, Path]) -> None:
    """As files of mixed kinds have, of which some are decoded."""
    opened = open_target(str(targets["gguf Q4_0"]))
    decoded, mixed = (opened.stack(dtype=torch.float32, coded=coded) for coded in (False, True))
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.down_proj"):
        mixed.set_submodule(name, frozen_linear(mixed.get_submodule(name).weight))
    prepare_models(mixed, {})
    positions = torch.arange(9)[None]
    states = [packed_hidden(stack, positions + 3, positions, torch.zeros_like(positions)) for stack in (decoded, mixed)]
    torch.testing.assert_close(states[1], states[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.slow
def test_drafters_for_it_are_lossless(tmp_path: Path, targets: dict[str, Path], corpus: DataConfig, form: str) -> None:
    target = targets[form]
    train_early_exit(distilling(target, corpus, tmp_path / "eesd", objective="forward_kl", train_head=False))
    finetune_drafter(finetuning(target, corpus, tmp_path / "small", objective="forward_kl"))
    train_eagle3(heading(target, corpus, tmp_path / "head"))
    sources = {"exit": "early_exit", "small": "small_lm", "head": "eagle3"}
    config = EvaluateConfig(
        checkpoint=str(tmp_path / "eesd"), small_lm=str(tmp_path / "small"), eagle3=str(tmp_path / "head"),
        device="cpu", max_new_tokens=12, out_dir=str(tmp_path / "report"),
        methods={name: MethodConfig(source, stop=StopConfig(max_draft=3)) for name, source in sources.items()},
    )  # fmt: skip
    evaluate(config, QUESTIONS[:2])
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    judged = {one["method"]: one["lossless"] for one in report["reports"] if one["method"] in config.methods}
    assert judged.keys() == config.methods.keys()
    assert all(one["identical"] == one["checked"] > 0 for one in judged.values())
    assert read_meta(tmp_path / "eesd").fingerprint.target == str(target)
    evaluate(replace(config, resume=True), QUESTIONS[:2])


@pytest.mark.parametrize("form", FORMATS)
def test_a_plan_converts_nothing(
    tmp_path: Path, targets: dict[str, Path], corpus: DataConfig, form: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    train_early_exit(distilling(targets[form], corpus, tmp_path / "eesd", plan=True))
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    plan_evaluation(EvaluateConfig(target=str(targets[form]), methods=methods, plan=True))
    assert capsys.readouterr().out.count("plan ") == 2
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_drafter_is_for_one_quantisation(tmp_path: Path, targets: dict[str, Path], corpus: DataConfig) -> None:
    train_early_exit(distilling(targets["gguf"], corpus, tmp_path / "eesd"))
    with pytest.raises(UserError, match=r"was trained for another target .* the weights differ in"):
        outrider.load(tmp_path / "eesd", target=str(targets["gguf Q4_0"]), device="cpu")


@pytest.mark.parametrize("form", FORMATS)
def test_it_answers_prompts(tmp_path: Path, targets: dict[str, Path], form: str) -> None:
    """With the text that it says greedily by itself."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"text": "import json"}) + "\n")
    data = DataConfig(source="local", path=str(tmp_path / "prompts.jsonl"), layout="text", heldout_fraction=0.0)
    options: Any = {"max_new_tokens": 8, "prefix_tokens": 11, "temperature": 0, "out_dir": str(tmp_path / "out")}
    generate_responses(GenerateConfig(target=str(targets[form]), data=data, **options))
    target, (response,) = open_target(str(targets[form])), read_responses(tmp_path / "out")
    (said,), asked = response.record["written"]["documents"], response.record["prompt_tokens"]
    ends, model = [target.tokenizer.eos_token_id], target.layers(dtype=torch.float32)
    assert said["ids"][asked:] == reference_generate(model, said["ids"][:asked], 8, ends)
