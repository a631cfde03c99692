"""An MTP head drafts as a loop without a cache, and commands take it from the target's own directory."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import outrider
from outrider.draft_models.eagle3.checkpoint import save_head
from outrider.draft_models.mtp.checkpoint import open_mtp
from outrider.draft_models.mtp.model import MtpHead
from outrider.draft_models.targets.open_target import load_config
from outrider.draft_models.targets.settings import ReadingChanges
from outrider.draft_models.targets.stack import LayerStack
from outrider.draft_models.tiny.models import save_tiny_mtp, tiny_head
from outrider.inference.core.target_session import Runtime
from outrider.inference.drafters.eagle3.drafter import Eagle3DraftModel
from outrider.inference.evaluate.evaluation import evaluate
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.kinds import KINDS, kind_in, presets_of
from outrider.inference.settings.method import MethodConfig, StopConfig
from tests.eagle3_heads import Row
from tests.faults import plant
from tests.gguf_files import save_plain_target, write_gguf
from tests.inference.drafters.test_eagle3 import drafts, graphed
from tests.mtp_heads import FAMILIES, head_weights, reference, stored_tensors, write_head
from tests.refusals import refusal
from tests.tiny import open_stack, save_target, shake_norms_and_biases

DENSE = {name: family for name, family in FAMILIES.items() if family.architecture in ("llama", "qwen2", "qwen3")}


@dataclass(frozen=True)
class Case:
    """A target in float64 and its head, with what a plain loop needs of both."""

    model: PreTrainedModel
    stack: LayerStack
    head: Any
    spelling: str
    weights: dict[str, Tensor]

    def expected(self, text: list[int], path: list[int]) -> Tensor:
        """Logits [V] after the committed `text` and the path, root first; transformers makes the hidden states."""
        before_norm: list[Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
        self.model(torch.tensor([text]))
        hook.remove()
        known = [*text, path[0]]
        rows = [Row(known[t + 1], t, range(t), before_norm[0][0, t]) for t in range(len(text))]
        for token in path[1:]:
            rows.append(Row(token, len(rows), range(len(rows)), len(rows) - 1))
        shared = self.model.get_input_embeddings().weight, self.model.model.norm, self.model.lm_head.weight
        return reference(FAMILIES[self.spelling], self.weights, *shared, rows)[-1]


@pytest.fixture
def case(tmp_path: Path) -> Callable[[str], Case]:
    def make(spelling: str) -> Case:
        family = DENSE[spelling]
        path = save_target(tmp_path / "target", family.architecture, kv_heads=2)
        shake_norms_and_biases(path)
        model, stack = open_stack(path, torch.float64)
        weights = {name: weight.double() for name, weight in head_weights(family).items()}
        where = write_head(tmp_path / "head", spelling, stored_tensors(spelling, weights))
        head = open_mtp(where, load_config(str(path))).load(torch.float64)
        head.use_target(stack)
        return Case(model, stack, head, spelling, weights)

    return make


def compare(case: Case, runtime: Runtime, length: int) -> int:
    rows = 0
    for text, path, logits in drafts(case.stack, Eagle3DraftModel(case.head), runtime, length):
        torch.testing.assert_close(logits, case.expected(text, path), rtol=1e-4, atol=1e-4)  # float32's rotary tables
        rows += 1
    return rows


@pytest.mark.parametrize(
    ("spelling", "runtime", "length"),
    [("mimo", Runtime, 3), ("deepseek", graphed, 4), ("speculators", graphed, 2), ("gguf", Runtime, 1)],
)
def test_drafts_are_those_of_a_loop_without_a_cache(
    case: Callable[[str], Case], spelling: str, runtime: Callable[[], Runtime], length: int
) -> None:
    assert compare(case(spelling), runtime(), length) == 15


FAULTS = {  # of the head, and what stands there instead
    "the state before the norm": ("features", "self._target[0].norm(aux)", "aux"),
    "the feature of every step is normed again": ("run", "self.hidden_norm(features)", "features"),
    "the output before the norm": ("run", "self.norm(hidden) if self.reading.norm_output else hidden", "hidden"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(case: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant(monkeypatch, MtpHead, *FAULTS[fault])
    with pytest.raises(AssertionError, match="not close"):
        compare(case("gguf"), Runtime(), 3)


# --- in commands


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target with a head of its own, as Qwen3's would be stored."""
    path = save_target(tmp_path / "whole", "qwen3", kv_heads=2, num_nextn_predict_layers=1)
    head = stored_tensors("qwen", head_weights(FAMILIES["gguf"]), offset=0.0)
    save_file({**load_file(path / "model.safetensors"), **head}, path / "model.safetensors", {"format": "pt"})
    return path


def config_for(target: Path, out: Path, **options: Any) -> EvaluateConfig:
    methods = {"m": MethodConfig("mtp", stop=StopConfig(max_draft=3))}
    fixed: Any = {"device": "cpu", "threads": 1, "compare_transformers": False, "max_new_tokens": 12, "doctor": False}
    prompts = ["once upon a time", "def add("]
    return EvaluateConfig(
        target=str(target), methods=methods, prompt_text=prompts, out_dir=str(out), **{**fixed, **options}
    )


def test_the_targets_own_head_drafts(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(config_for(target, tmp_path / "out", mtp="target"))
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] == 2
    assert report["drafted_tokens_per_round"] > 1
    assert report["drafter"] == str(target)
    answer = json.loads((tmp_path / "out/generations.jsonl").read_text().splitlines()[0])["text"]
    capsys.readouterr()
    evaluate(config_for(target, tmp_path / "plan", mtp="target", plan=True))
    assert "mtp's weights: " in capsys.readouterr().out
    assert presets_of({"mtp": "target"}) == ["mtp/survival"]
    decoder = outrider.load(str(target), mtp="target", method="mtp/fixed", device="cpu")
    assert decoder.generate("once upon a time", max_new_tokens=12) == answer


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_a_target_as_its_file_stores_it_shares_embedding_and_head(tmp_path: Path, kind: str) -> None:
    """Its embedding, whose rows are codes, has no weight."""
    path, where = write_gguf(save_plain_target(tmp_path / "plain"), tmp_path / "target.gguf", "Q8_0"), tmp_path / "head"
    config = load_config(str(path))
    if kind == "mtp":
        save_tiny_mtp(where, config)
    else:
        save_head(where, tiny_head(config), "specforge", config, str(path))
    drafting = config_for(path, tmp_path / "out", mtp=str(where))
    evaluate(replace(drafting, **{"mtp": None, kind: str(where)}, methods={"m": MethodConfig(kind)}))
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["lossless"]["identical"] == report["lossless"]["checked"] == 2
    assert report["drafted_tokens_per_round"] > 1


def test_a_resumed_run_has_the_same_head(target: Path, tmp_path: Path) -> None:
    alone = write_head(tmp_path / "alone", "qwen", stored_tensors("qwen", head_weights(FAMILIES["gguf"]), offset=0.0))
    evaluate(config_for(target, tmp_path / "out", mtp=alone))
    other = {name: 2 * tensor for name, tensor in load_file(Path(alone) / "model.safetensors").items()}
    save_file(other, Path(alone) / "model.safetensors")
    refusal(r"other settings: mtp\.mtp", evaluate, config_for(target, tmp_path / "out", mtp=alone, resume=True))


def test_the_doctor_and_errors_say_that_a_head_was_lost(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(target / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    said = r"declares an MTP head \(num_nextn_predict_layers=1\) that its weights lack"
    refusal(said, evaluate, config_for(target, tmp_path / "out", mtp="target"))
    config = config_for(target, tmp_path / "lookup", mtp="target", doctor=True)
    evaluate(replace(config, mtp=None, methods={"m": MethodConfig("prompt_lookup")}))
    assert "that its weights lack" in capsys.readouterr().err


def test_settings_of_a_head(target: Path, tmp_path: Path) -> None:
    alone = write_head(tmp_path / "alone", "qwen", stored_tensors("qwen", head_weights(FAMILIES["gguf"])))
    assert kind_in(alone) == KINDS["mtp"]
    assert kind_in(str(target)) == KINDS["small_lm"]  # a target with a head is a target
    refusal("mtp: missing; .*target, if it has an MTP head", config_for, target, tmp_path / "out")
    lookup = {"m": MethodConfig("prompt_lookup")}
    changed = ReadingChanges(hidden_first=True)
    refusal("reading.hidden_first", EvaluateConfig, target="t", methods=lookup, reading=changed)
    refusal(
        "mtp='target': expected a directory of that revision", config_for, "o/n", tmp_path, mtp="target", revision="a"
    )
    refusal("mtp='target'|target: missing", EvaluateConfig, mtp="target", methods=lookup)
