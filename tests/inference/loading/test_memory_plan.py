"""plan=true: what it says of weights and caches is what loading and decoding really take."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import LlamaConfig

from data_prep.text.settings import DataConfig
from draft_models.early_exit.checkpoint import save_pretrained
from draft_models.targets.open_target import open_target
from draft_models.targets.stack import LayerStack
from inference.core.decode import autoregressive, speculative
from inference.drafters.early_exit import EarlyExitPlugin
from inference.drafters.ngram.lookup import PromptLookup
from inference.engines.footprint import Place, cache_bytes, pass_bytes, weight_bytes
from inference.engines.graphs.cuda_graphs import Graphed
from inference.evaluate.compare import evaluate
from inference.settings.evaluate import EvaluateConfig
from inference.settings.method import MethodConfig
from tests.families import FAMILIES, TYPICAL, save_family
from tests.tiers import quick_where, typical_where
from tests.tiny import LAYERS, make_drafter, random_prompt, save_target
from tests.train.jobs import calibrating, save_for_calibration
from train.recipes.calibration import calibrate
from train.recipes.eagle3 import train_eagle3
from train.recipes.early_exit import train_early_exit
from train.settings.drafters import EesdConfig
from train.settings.eagle3 import Eagle3Config
from train.settings.fit import FitConfig

EVERY = typical_where(TYPICAL.__contains__, quick_where(lambda name: name in ("llama", "gpt2"), sorted(FAMILIES)))


@pytest.mark.parametrize("family", EVERY)
def test_weights_are_what_loading_takes(tmp_path: Path, family: str) -> None:
    """Tied or not."""
    target = open_target(str(save_family(tmp_path, family)))
    model = target.layers(dtype=torch.bfloat16)
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert held == pytest.approx(weight_bytes(target.config, Place(2, 64)), rel=0.02)  # a router may stay in float32


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_caches_are_what_decoding_takes(tmp_path: Path, family: str) -> None:
    """In passes of fixed shape, for texts as long as were planned."""
    target = open_target(str(save_family(tmp_path, family)))
    runtime, place = Graphed(), Place(4, 100)
    runtime.prepare(place.positions, ())
    list(autoregressive(target.stack(dtype=torch.float32), random_prompt(60), max_new_tokens=40, runtime=runtime))
    (arena,) = runtime._arenas.values()
    assert arena.capacity == place.slots
    assert arena.rest._buffer is not None
    assert arena.rest._buffer.nbytes == cache_bytes(target.config, place)


def test_a_matrix_with_two_names_is_held_once(tmp_path: Path) -> None:
    target = open_target(str(save_target(tmp_path, tied=True, kv_heads=2)))
    held = sum(parameter.nbytes for parameter in target.layers(dtype=torch.float32).parameters())
    assert held == weight_bytes(target.config, Place(4, 64))


def test_passes_write_no_more_than_is_planned(tmp_path: Path) -> None:
    """Hidden states and logits of the widest pass, whose size the vocabulary decides."""
    target = open_target(str(save_target(tmp_path, kv_heads=2)))
    runtime = Graphed()
    prompt = random_prompt(9) * 3  # what is looked up is found
    list(speculative(target.stack(dtype=torch.float32), PromptLookup(), prompt, max_new_tokens=20, runtime=runtime))
    (arena,) = runtime._arenas.values()
    written = sum(buffer.nbytes for buffer in arena.buffers.values() if buffer.is_floating_point())
    planned = pass_bytes(target.config, Place(4, 100))
    assert 0 < written <= planned < 2 * written


@pytest.mark.parametrize("gpu", [False, True])
def test_a_plan_is_of_the_device_that_a_run_would_use(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """Unless another one is named, which need not be here. No other machine's is supposed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    llama_2_70b().save_pretrained(tmp_path)
    config = EvaluateConfig(target=str(tmp_path), methods={"m": MethodConfig(source="prompt_lookup")}, plan=True)
    text = {"data": DataConfig(), "fit": FitConfig(steps=1)}
    here, other = ("cuda", "cpu") if gpu else ("cpu", "cuda")
    for plan in (
        lambda: evaluate(config),
        lambda: train_eagle3(Eagle3Config(target=str(tmp_path), plan=True, **text)),
    ):
        plan()
        first, weights, *_ = capsys.readouterr().out.splitlines()
        assert first.endswith(f" device={here}")
        held = float(weights.split()[-2])
        assert held == pytest.approx(68.98 * (2 if gpu else 4), abs=0.03)
    train_early_exit(EesdConfig(target=str(tmp_path), plan=True, **text))
    assert capsys.readouterr().out.splitlines()[0].endswith(f" device={here}")
    evaluate(replace(config, device=other))
    assert capsys.readouterr().out.splitlines()[0].endswith(f" device={other}")


def test_on_a_cpu_the_runtime_has_packed_weights_besides(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    llama_2_70b().save_pretrained(tmp_path)
    config = EvaluateConfig(target=str(tmp_path), methods={"m": MethodConfig(source="prompt_lookup")}, plan=True)
    found = {}
    for device in ("cpu", "cuda"):
        evaluate(replace(config, device=device))
        lines = capsys.readouterr().out.splitlines()
        found[device] = [float(line.split()[-2]) for line in lines[1:] if "weights" in line or "packed" in line]
    (plain,) = found["cuda"]
    cpu, packed, read = found["cpu"]
    assert packed == read == cpu > 0
    assert plain > 0


@pytest.mark.parametrize(
    ("answers", "read"),
    [("target", "target's weights"), ("recorded", f"target's first {LAYERS - 1} layers, embedding and head")],
)
def test_a_capture_holds_an_early_exit_beside_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture, answers: Literal["target", "recorded"], read: str
) -> None:
    """For texts of a prompt and what continues it; nothing is captured."""
    folder = save_for_calibration(tmp_path)
    calibrate(calibrating(folder, tmp_path / "out", plan=True, answers=answers))
    said = capsys.readouterr().out
    first, *lines = said[said.index("plan ") :].splitlines()  # what libraries say stands before it
    assert first.startswith("plan positions=88 ")
    assert [line.strip().partition(":")[0] for line in lines] == [
        read,
        "early exit's weights",
        "caches of decoding with it",
    ]
    assert not (tmp_path / "out").exists()


def llama_2_70b() -> LlamaConfig:
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    return LlamaConfig(
        **shape, num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096, dtype="float16",
        tie_word_embeddings=False,
    )  # fmt: skip


def test_the_papers_largest_target(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By its config alone: 68.98 B parameters of two bytes."""
    llama_2_70b().save_pretrained(tmp_path)
    methods = {"lookup": MethodConfig(source="prompt_lookup")}
    evaluate(EvaluateConfig(target=str(tmp_path), methods=methods, device="cuda", plan=True))
    first, target, caches = capsys.readouterr().out.splitlines()
    assert first.startswith("plan positions=4096 dtype=float16 device_gb=")
    assert float(target.split()[-2]) == pytest.approx(137.95, abs=0.01)
    assert float(caches.split()[-2]) == pytest.approx(1.38, abs=0.02)


def test_an_early_exit_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Its sessions have caches of their own."""
    path = save_target(tmp_path / "target")
    target = open_target(str(path))
    drafter = make_drafter(path, LAYERS - 1)
    save_pretrained(tmp_path / "drafter", drafter, target.fingerprint, {}, torch.float32)
    methods = {"m": MethodConfig()}
    config = EvaluateConfig(checkpoint=str(tmp_path / "drafter"), methods=methods, plan=True, dtype="float32")
    evaluate(config)
    lines = capsys.readouterr().out.splitlines()
    own = sum(parameter.nbytes for parameter in drafter.parameters()) / 1e9
    assert f"  early exit's weights: {own:.3f} GB" in lines
    assert any(line.startswith("  caches of decoding with it: ") for line in lines)
    assert isinstance(target.stack(dtype=torch.float32), LayerStack)
    save_pretrained(tmp_path / "deep", make_drafter(path, 2, depth=2), target.fingerprint, {}, torch.float32)
    place = Place(4, 64)
    one, two = (EarlyExitPlugin().held(str(tmp_path / name), target.config, place) for name in ("drafter", "deep"))
    more = two["caches of decoding with it"] - one["caches of decoding with it"]
    assert more == cache_bytes(target.config, place, layers=1)
