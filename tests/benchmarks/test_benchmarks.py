"""The benchmarks' own parts: the models they compare are the same ones, the bytes they count are all the bytes."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from draft_models.early_exit.checkpoint import save_pretrained
from draft_models.early_exit.model import EarlyExit, NoLayer
from draft_models.targets.architectures import load_config
from draft_models.targets.fingerprint import fingerprint_target
from draft_models.targets.open_target import load_tokenizer, open_target
from draft_models.targets.stack import LayerStack
from draft_models.targets.tensor_files import open_tensors
from inference.core.target_session import TargetSession
from inference.core.tree import ROOT, chain_parents
from inference.drafters.early_exit import EarlyExitSource
from outrider.errors import UserError
from tests.families import save_family
from tests.tiers import typical_where
from tests.tiny import ARCHITECTURES, LAYERS, VOCABULARY, make_drafter, open_stack, random_prompt, save_target

TINY = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


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
    from subjects import as_model

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
    from subjects import as_model

    path = save_target(tmp_path)
    with pytest.raises(UserError, match="exit_depth=1"):
        as_model(str(path), make_drafter(path, 1, depth=2), torch.device("cpu"), torch.float32)


def test_weights_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import floor_shapes

    monkeypatch.setitem(floor_shapes.SHAPES, "tiny", TINY)
    config: LlamaConfig = TINY
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64  # q and o, k and v, the SwiGLU, two norms
    weights = floor_shapes.weigh(config)
    assert weights == floor_shapes.Weights(layer, 64 * VOCABULARY, 64 * VOCABULARY, 2 * 2 * 16)
    assert weights.read(LAYERS, 10) == LAYERS * (layer + 10 * 64) + 64 * VOCABULARY
    target = floor_shapes.make_target("tiny", torch.bfloat16, torch.device("cpu"))
    assert target.drafter.exit_layer == 1
    assert target.stack.dtype == torch.bfloat16


@pytest.mark.parametrize("runtime", ["eager", "graphed"])
def test_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str) -> None:
    import bench_floor

    monkeypatch.setitem(bench_floor.SHAPES, "tiny", TINY)
    lengths, uncompiled = [], []

    def compiles(model: torch.nn.Module, mode: str, dynamic: bool) -> Any:
        def step(tokens: torch.Tensor, past_key_values: Any) -> Any:
            lengths.append(int(past_key_values.get_seq_length()))
            return model(tokens, past_key_values=past_key_values)

        uncompiled.append((mode, dynamic))
        return step

    monkeypatch.setattr(torch, "compile", compiles)  # minutes on a CPU
    options = ["--shapes", "tiny", "--contexts", 66, "--repeats", 1, "--buffer-gb", 0.01, "--runtime", runtime]
    run(monkeypatch, bench_floor, *options, "--compiled", "--out", tmp_path)
    assert uncompiled == [("reduce-overhead", False)]
    assert set(lengths) == {66}  # each pass is over the same text
    found = json.loads((tmp_path / "floor_cpu.json").read_text())["shapes"][0]
    assert found["runtime"] == runtime
    (result,) = found["contexts"]
    assert set(result["verify"]) == {"1", "2", "4", "8", "16", "32", "64"}
    assert set(result["compiled"]) == {"1", "16"}
    assert result["draft_step"]["layers"] == 2
    assert 0 < result["draft_step"]["share_of_bytes"] < 1
    drafted = {"autoregressive": 0, "chain of 4": 4, "tree of 32": 32}
    for name, count in drafted.items():
        entry = result["rounds"][name]
        assert entry["drafted"] <= count
        assert 0 < entry["outside_passes"]["seconds"] < entry["seconds"]
    assert (tmp_path / "floor_cpu.png").stat().st_size > 0


def test_floor_leaves_out_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_floor

    monkeypatch.setattr(bench_floor, "free_bytes", lambda _: 10 * 2**30)
    run(monkeypatch, bench_floor, "--shapes", "13b", "--buffer-gb", 0.01, "--out", tmp_path)
    assert not (tmp_path / "floor_cpu.png").exists()
    assert json.loads((tmp_path / "floor_cpu.json").read_text())["shapes"][0]["left_out"]


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


@pytest.mark.parametrize("temperature", typical_where((0).__eq__, [0, 1]))
@pytest.mark.slow
def test_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: int) -> None:
    import bench_peers

    path, small = save_target(tmp_path / "target", eos_token_id=257), save_target(tmp_path / "small", seed=1)
    fingerprint = fingerprint_target(open_tensors(str(path)), load_config(str(path)), load_tokenizer(str(path)))
    drafter = make_drafter(path, 2, noise=0.1)
    save_pretrained(tmp_path / "eesd", drafter, fingerprint, {}, torch.float32)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}: "}) + "\n" for i in range(2)))
    out = tmp_path / "peers.json"
    models = ["--target", path, "--checkpoint", tmp_path / "eesd", "--drafter", small, "--no-random"]
    sizes = ["--prompts", prompts, "--max-new-tokens", 24, "--temperature", temperature, "--out", out]
    run(monkeypatch, bench_peers, *models, *sizes)
    (result,) = json.loads(out.read_text())["results"]
    arms = result["arms"]
    assert result["prompts"] == 2
    assert {name for pair in bench_peers.PAIRS for name in pair} == set(arms)
    assert all(arm["equal_to_generate"] == (None if temperature else 2) for arm in arms.values())
    assert arms["transformers_generate"]["tau"] == arms["autoregressive"]["tau"] == 1
    assert set(result["ratios"]) == {f"{ours} / {theirs}" for ours, theirs in bench_peers.PAIRS}
    if not temperature:
        assert arms["early_exit"]["tau"] > 1
        assert arms["early_exit"]["tau"] == pytest.approx(arms["transformers_assisted_early_exit"]["tau"], rel=0.25)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Every layout runs the same passes, which leave nothing behind; all of them are in the results."""
    import bench_layouts

    path, threads = save_target(tmp_path / "target", "llama", kv_heads=2), torch.get_num_threads()
    monkeypatch.setattr(bench_layouts, "measure_device", lambda *_: {"read_bytes_per_second": 1e9})
    monkeypatch.setattr(bench_layouts, "WIDTHS", (1, 3))
    out = tmp_path / "layouts.json"
    given = ("--threads", threads, "--repeats", 1, "--context", 9, "--dtype", dtype, "--out", out)
    run(monkeypatch, bench_layouts, "--target", path, *given)
    (entry,) = json.loads(out.read_text())["entries"].values()
    (result,) = entry["results"]
    assert result["milliseconds"].keys() == {"plain", "blocked", "panels", "layer by layer", "chosen", "int8"}
    assert all(by_width.keys() == {"1", "3"} for by_width in result["milliseconds"].values())
    text = torch.arange(9)
    expected = None
    for layout in result["milliseconds"]:
        stack = bench_layouts.laid_out(open_target(str(path)), getattr(torch, dtype), layout)
        passes, other = bench_layouts.Passes(stack, text), bench_layouts.Passes(stack, text)
        passes.run(3)
        for session in (passes.session, other.session):
            session.feed(text[4:5], (ROOT,))
        logits = [session.finish() for session in (passes.session, other.session)]
        torch.testing.assert_close(*logits, rtol=0, atol=0)
        expected = logits[0] if expected is None else expected
        if layout != "int8":  # which is another model
            near = {"rtol": 0.02, "atol": 0.02} if dtype == "bfloat16" else {}
            torch.testing.assert_close(logits[0], expected, **near)


def test_losses_are_timed_by_rows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_losses

    monkeypatch.setattr(bench_losses, "HEADS", ((8, 64),))
    run(monkeypatch, bench_losses, "--rows", 5, "--repeats", 1, "--out", tmp_path / "losses.json")
    (head,) = json.loads((tmp_path / "losses.json").read_text())["heads"]
    assert (head["width"], head["tokens"]) == (8, 64)
    for by_rows in head["seconds"].values():
        assert {int(rows) for rows in by_rows} == set(bench_losses.CHUNKS)
        assert min(by_rows.values()) > 0


def test_timed_losses_are_of_a_distribution_and_of_tokens() -> None:
    """Cached distributions of different tokens that add up to 1; every loss is positive and has gradients for both
    sides."""
    import bench_losses

    hidden, weight = torch.randn(6, 8).requires_grad_(), torch.randn(64, 8).requires_grad_()
    values = []
    for loss in bench_losses.losses(6, 8, 64).values():
        values.append(loss(hidden, weight, 4))
        assert all(gradient.abs().sum() > 0 for gradient in torch.autograd.grad(values[-1], [hidden, weight]))
    assert all(value > 0 for value in values)
    assert len({round(float(value), 3) for value in values}) == len(values)
