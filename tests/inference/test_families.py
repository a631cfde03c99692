"""Every family of targets that proves itself: the same tokens as transformers, whatever drafts, and training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.base.streams import Streams
from outrider.draft_models.early_exit.model import EarlyExit, exit_layers
from outrider.draft_models.targets import attention
from outrider.draft_models.targets.open_target import OpenTarget, open_target
from outrider.draft_models.targets.proof import prove_layers
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.core.target_session import Runtime
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.drafters.early_exit.drafter import EarlyExitDraftModel
from outrider.inference.drafters.model_drafter import ModelDrafter
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.settings.method import StructureConfig
from outrider.inference.shapes.factory import make_structure
from tests.families import FAMILIES, LAYERS, TYPICAL, save_family
from tests.refusals import refusal
from tests.tiers import quick_where, typical_where
from tests.tiny import method_of, random_prompt, reference_generate
from tests.train.jobs import exit_student

SHAPES = (StructureConfig(), StructureConfig(kind="opt_tree", nodes=10, delta=0.0, max_depth=5))
TOKENS = 20


def test_there_are_forty_families() -> None:
    assert len(FAMILIES) >= 40


EVERY = typical_where(TYPICAL.__contains__, quick_where(lambda name: name in ("gemma2", "gpt2"), sorted(FAMILIES)))


@pytest.fixture(scope="module", params=EVERY)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenTarget:
    return open_target(str(save_family(tmp_path_factory.mktemp(request.param), request.param)))


def exit_of(target: OpenTarget, exit_layer: int, noise: float) -> EarlyExit:
    """The target's last layer after `exit_layer` layers, its matrices shaken so that some drafts are wrong."""
    model = target.layers(exit_layers(target.config, exit_layer), dtype=torch.float32)
    drafter = EarlyExit(model, exit_layer, own_head=True).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in drafter.layer.parameters():
        if parameter.ndim > 1:
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return drafter


def test_greedy_equals_generate(target: OpenTarget) -> None:
    """Beyond every window; chain and tree, split at an early exit and unsplit, eager or in fixed shapes."""
    stack, prompt = target.stack(dtype=torch.float32), random_prompt(14)
    plain = AutoModelForCausalLM.from_pretrained(target.source, dtype=torch.float32).eval()
    expected = reference_generate(plain, prompt, TOKENS)
    exits = EarlyExitDraftModel(exit_of(target, LAYERS - 1, noise=0.05))
    chain, tree = (ModelDrafter(exits, make_structure(method_of(shape), Streams(0))) for shape in SHAPES)
    plainly = autoregressive(stack, prompt, max_new_tokens=TOKENS)
    assert [t for r in plainly for t in r.tokens] == expected
    eager, graphed, drafted = Runtime(), Graphed(), 0
    for drafter, runtime in ((PromptLookup(), eager), (chain, eager), (tree, graphed)):
        rounds = list(speculative(stack, drafter, prompt, max_new_tokens=TOKENS, runtime=runtime))
        assert [t for r in rounds for t in r.tokens] == expected
        drafted += sum(r.accepted for r in rounds)
    assert drafted > 0


def test_an_early_exit_trains_on_it(target: OpenTarget) -> None:
    """A step of either objective lowers the loss of its batch; packed rows of two documents."""
    ids = torch.tensor([random_prompt(24, seed=3)])
    documents = torch.tensor([[0] * 14 + [1] * 10])
    positions = torch.cat([torch.arange(14), torch.arange(10)])[None]
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "positions": positions, "documents": documents}
    for distill in (False, True):
        layers = None if distill else exit_layers(target.config, 2)
        model = target.layers(layers, dtype=torch.float32)
        student = exit_student(model, 2, train_head=False, objective="forward_kl" if distill else "cross_entropy")
        trained = [p for p in student.parameters() if p.requires_grad]
        before = student(**batch)["loss_sum"]
        before.backward()
        with torch.no_grad():
            size = torch.cat([p.grad.flatten() for p in trained if p.grad is not None]).norm()
            for p in trained:
                if p.grad is not None:
                    p -= 1e-2 / size * p.grad
        assert student(**batch)["loss_sum"] < before


QUIRKS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "embedding scale": ("granite", lambda parts: {"scale": 1.0}, "scale"),
    "logit scale": ("cohere", lambda parts: {"logits": type(parts.logits)()}, "logits"),
    "logit soft cap": ("gemma2", lambda parts: {"logits": type(parts.logits)()}, "logits"),
    "learned positions": ("gpt2", lambda parts: {"positions": None}, "positions"),
    "a norm before the layers": ("nanochat", lambda parts: {"input_norm": None}, "input_norm"),
    "sliding windows": ("mistral", lambda parts: {"calls": tuple(slid(c, False) for c in parts.calls)}, "calls"),
    "alternating windows": ("gemma3_text", lambda parts: {"calls": tuple(slid(c, True) for c in parts.calls)}, "calls"),
    "two rotary tables": ("gemma3_text", lambda parts: {"calls": tuple(first(c) for c in parts.calls)}, "calls"),
}


def slid(call: Any, slides: bool) -> Any:
    return type(call)(call.keywords, call.table, slides)


def first(call: Any) -> Any:
    return type(call)(call.keywords, 0, call.slides)


def test_scales_are_seen_unrounded(tmp_path: Path) -> None:
    """Where the config says bfloat16, which has three digits, and the weights are opened in float32."""
    changes = {"dtype": "bfloat16", "embedding_multiplier": 1.7003, "logits_scaling": 1.3007}
    target = open_target(str(save_family(tmp_path, "granite", **changes)))
    assert target.config.dtype == torch.bfloat16
    stack, prompt = target.stack(dtype=torch.float32), random_prompt(14)
    assert stack.spec.scale == pytest.approx(1.7003, rel=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(target.source, dtype=torch.float32).eval()
    rounds = autoregressive(stack, prompt, max_new_tokens=TOKENS)
    assert [t for r in rounds for t in r.tokens] == reference_generate(plain, prompt, TOKENS)


@pytest.mark.parametrize("quirk", QUIRKS)
def test_a_quirk_that_is_ignored_is_refused(tmp_path: Path, quirk: str) -> None:
    family, change, field = QUIRKS[quirk]
    target = open_target(str(save_family(tmp_path, family)))
    model: Any = target.layers(dtype=torch.float32)
    prove_layers(model, "target=whole")
    changed = change(model.spec)
    assert changed[field] != getattr(model.spec, field)
    model.spec = type(model.spec)(**{**vars(model.spec), **changed})
    refusal("differ from its own forward's by", prove_layers, model, "target=ignored")


def test_a_quirk_of_attention_that_is_ignored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft caps of scores, and sinks."""
    for family, option in (("gemma2", "softcap"), ("gpt_oss", "s_aux")):
        model = open_target(str(save_family(tmp_path / family, family))).layers(dtype=torch.float32)
        ours = attention._attend_by_capped_scores

        def ignoring(*args: Any, ours: Any = ours, option: str = option) -> Any:
            place = {"softcap": 6, "s_aux": 7}[option]
            return ours(*(None if i == place else arg for i, arg in enumerate(args)))

        with monkeypatch.context() as patch:
            patch.setattr(attention, "_attend_by_capped_scores", ignoring)
            refusal("differ from its own forward's by", prove_layers, model, "target=ignored")


FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind: family, what is changed, its rope_parameters
    "longrope": ("phi3", {"max_position_embeddings": 128, "original_max_position_embeddings": 48}, FACTORS),
    "dynamic": ("llama", {"max_position_embeddings": 48}, {"factor": 2.0}),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_that_rescales_is_ordinary_within_its_range(tmp_path: Path, kind: str) -> None:
    """Beyond the range every key would change with the length of the text: a text may not get there."""
    family, changes, more = ROPES[kind]
    rope = {"rope_type": kind, "rope_theta": 1e4, **more}
    target = open_target(str(save_family(tmp_path, family, rope_parameters=rope, **changes)))
    plain = AutoModelForCausalLM.from_pretrained(target.source, dtype=torch.float32).eval()
    stack, prompt = target.stack(dtype=torch.float32), random_prompt(14)
    for runtime in (Runtime(), Graphed()):
        rounds = speculative(stack, PromptLookup(), prompt, max_new_tokens=34, runtime=runtime)
        assert [t for r in rounds for t in r.tokens] == reference_generate(plain, prompt, 34)
    refusal("exceeds the target's context of 48", next, speculative(stack, PromptLookup(), prompt, max_new_tokens=35))
