"""The benchmarks' own parts: the models they compare are the same ones, the bytes they count are all the bytes."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outrider.base.errors import UserError
from outrider.draft_models.early_exit.model import EarlyExit, NoLayer
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.target_session import TargetSession
from outrider.inference.core.tree import ROOT, chain_parents
from outrider.inference.drafters.early_exit import EarlyExitSource
from tests.families import save_family
from tests.tiny import ARCHITECTURES, VOCABULARY, make_drafter, open_stack, random_prompt, save_target


def run(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def draft_logits(stack: LayerStack, drafter: EarlyExit, tokens: list[int]) -> torch.Tensor:
    """The drafter's logits after each of the last three of `tokens`."""
    session, source = TargetSession(stack, drafter.exit_layer, 64), EarlyExitSource(drafter)
    prompt, last = tokens[:-3], torch.tensor(tokens[-3:])
    session.feed(torch.tensor(prompt), chain_parents(0, len(prompt)))
    session.finish(last_only=True)
    source.begin(session)
    session.commit(range(len(prompt)))
    return source.extend(last, (ROOT, 0, 1))


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("own_layer", [True, False])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "phi"])  # whose head has a bias
def test_transformers_gets_the_same_drafter(tmp_path: Path, architecture: str, own_layer: bool, own_head: bool) -> None:
    from transformers_arms import as_model

    path = save_family(tmp_path, "phi") if architecture == "phi" else save_target(tmp_path, architecture, kv_heads=2)
    drafter = make_drafter(path, 2, noise=0.5, own_head=own_head)
    if not own_layer:
        drafter.layer = NoLayer()
    if drafter.head is not None:
        for weight in drafter.head.parameters():
            weight += 0.1
    drafter.norm.weight += 0.1
    tokens = random_prompt(9)
    model = as_model(str(path), drafter, torch.device("cpu"), torch.float32)
    assert model.config.num_hidden_layers == 2 + own_layer
    _, stack = open_stack(path)
    if drafter.head is None:
        drafter.use_head(stack.head)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0, -3:]
        torch.testing.assert_close(draft_logits(stack, drafter, tokens), expected, rtol=1e-4, atol=1e-4)


def test_an_exit_of_several_layers_is_not_given_to_transformers(tmp_path: Path) -> None:
    from transformers_arms import as_model

    path = save_target(tmp_path)
    with pytest.raises(UserError, match="exit_depth=1"):
        as_model(str(path), make_drafter(path, 1, depth=2), torch.device("cpu"), torch.float32)


def test_judgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a drafter of its own, as for a target that is only at hand; the gravest fault is refused."""
    import bench_judgement

    path, fault = save_target(tmp_path / "target"), "a wrong cache row after a rejection"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}: "}) + "\n" for i in range(3)))
    options = ["--seeds", 4, "--num-prompts", 2, "--max-new-tokens", 12, "--faults", fault]
    run(monkeypatch, bench_judgement, "--target", path, "--prompts", prompts, *options, "--out", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    refused = {row["fault"]: row["refused"] for row in rows if row["arm"] == "tree"}
    assert refused == {"none": False, fault: True}
    assert {row["seed"] for row in rows} == {4}


def test_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of round is there, a draft is at most as long as asked, and the parts are the whole."""
    import bench_decode

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    monkeypatch.setattr(
        bench_decode, "RANDOM", {**bench_decode.RANDOM, **sizes, "num_attention_heads": 4, "num_key_value_heads": 2}
    )
    options = ["--num-prompts", 2, "--max-new-tokens", 8, "--draft-tokens", 3, "--out", tmp_path / "out.json"]
    run(monkeypatch, bench_decode, *options)
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["rounds"].keys() == {"autoregressive", *bench_decode.methods_for(3)}
    for name, one in result["rounds"].items():
        assert sum(one["seconds_by_part"].values()) == pytest.approx(one["seconds_of_a_round"])
        assert one["tau"] >= 1
        if name.startswith(("auto", "chain")):
            assert one["drafted_per_round"] <= (0 if name == "autoregressive" else 3)
