"""Evaluations in bfloat16 of targets that are no Llamas: what is planted is found, and nothing where nothing is."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.planted_faults import rope_scaled
from draft_models.early_exit.checkpoint import save_pretrained
from draft_models.targets.model_spec import LogitRule
from draft_models.targets.open_target import open_target
from draft_models.targets.stack import LayerStack
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import MethodConfig
from tests.families import LAYERS, save_family
from tests.inference.evaluate.evaluating import QUESTIONS, evaluate
from tests.tiers import quick_where, typical_where
from tests.tiny import STRUCTURES, make_drafter, method_of, unproven


def without_rule() -> AbstractContextManager[Any]:
    """The head's logits as they are. It leaves every greedy choice as it was."""
    logits = LayerStack.logits

    def bare(stack: LayerStack, hidden: torch.Tensor) -> torch.Tensor:
        ruled, stack.spec = stack.spec, replace(stack.spec, logits=LogitRule())
        try:
            return logits(stack, hidden)
        finally:
            stack.spec = ruled

    return patch.object(LayerStack, "logits", bare)


def late_positions() -> AbstractContextManager[Any]:
    """Learned positions of the next place, for all tokens but the first."""
    embed = LayerStack.embed
    return patch.object(LayerStack, "embed", lambda stack, tokens, places: embed(stack, tokens, (places - 1).clamp(0)))


METHODS = {
    "chain": method_of(STRUCTURES["chain"]),
    "tree": method_of(STRUCTURES["opt_tree"]),
    "lookup": MethodConfig(source="prompt_lookup"),
}
CHANGES = {"gemma2": {"final_logit_softcapping": 1.0}}  # or few logits come near it
FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "cohere": without_rule,
    "gemma2": without_rule,
    "gpt2": late_positions,
    "gpt_neox": lambda: rope_scaled(1.02),
    "granite": without_rule,
    "mixtral": lambda: rope_scaled(1.02),
    "phi": lambda: rope_scaled(1.02),
    "qwen2_moe": lambda: rope_scaled(1.02),
}


@pytest.mark.parametrize(
    "family",
    typical_where(lambda name: name in ("gemma2", "gpt2", "mixtral"), quick_where(lambda name: name == "gpt2", FAULTS)),
)
def test_a_family_is_judged_in_half_precision(tmp_path: Path, family: str) -> None:
    """An early exit in chains and trees, and prompt lookup."""
    path = save_family(tmp_path / "target", family, **CHANGES.get(family, {}))
    drafter = make_drafter(path, LAYERS - 1, noise=0.05)
    save_pretrained(tmp_path / "drafter", drafter, open_target(str(path)).fingerprint, {}, torch.float32)
    config = EvaluateConfig(
        checkpoint=str(tmp_path / "drafter"), methods=METHODS, max_new_tokens=16, device="cpu", threads=1,
        dtype="bfloat16", out_dir=str(tmp_path / "right"), show_prompts=0,
    )  # fmt: skip
    evaluate(config, QUESTIONS[:1])
    reports = json.loads((tmp_path / "right/report.json").read_text())["reports"]
    assert [report["method"] for report in reports] == list(METHODS)
    assert reports[0]["tau"] > 1.5
    for report in reports:
        judged = report["lossless"]["judged"]
        assert judged.keys() == {report["method"], "autoregressive"}
        for found in judged.values():
            assert found["faults"] == []
            assert 0.5 < found["bulk"] < 1.1
            assert found["peak"] < 4
    with unproven(), FAULTS[family](), pytest.raises(SystemExit):
        evaluate(replace(config, out_dir=str(tmp_path / "wrong")), QUESTIONS[:1])
    for report in json.loads((tmp_path / "wrong/report.json").read_text())["reports"]:
        assert all(found["faults"] for found in report["lossless"]["judged"].values())
