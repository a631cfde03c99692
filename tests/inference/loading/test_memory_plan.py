"""plan=true: what it says of weights, caches and a training is what loading, decoding and a step really take."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig

from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.model import exit_layers
from outrider.draft_models.targets.model_files import load_layers
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.evaluate.evaluation import evaluate
from outrider.inference.loading import memory_plan
from outrider.inference.loading.memory_plan import Storage, cache_bytes, explain_out_of_memory, pass_bytes, weight_bytes
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from outrider.train.core.optimizers import build_optimizer
from outrider.train.eagle3 import train_eagle3
from outrider.train.eesd import EarlyExitStudent, empty_student, plan_memory, train_early_exit
from outrider.train.settings.drafters import Eagle3Config, EesdConfig
from outrider.train.settings.fit import FitConfig
from tests.families import FAMILIES, TYPICAL, save_family
from tests.refusals import refusal
from tests.tiers import quick_where, typical_where
from tests.tiny import LAYERS, random_prompt, save_exit, save_target
from tests.train.jobs import distilling, write_corpus

LOOKUP = {"m": MethodConfig(source="prompt_lookup")}
CONFIG = EesdConfig(target="t", data=DataConfig(), fit=FitConfig(steps=1), frozen_dtype="bfloat16")


def llama_2(size: int = 70, **changes: Any) -> LlamaConfig:
    shape = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
    if size == 70:
        shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        shape |= {"num_key_value_heads": 8}
    given = {"vocab_size": 32000, "max_position_embeddings": 4096, "dtype": "float16"}
    return LlamaConfig(**{**shape, **given, **changes})


def held(config: EesdConfig, target: LlamaConfig, exit_layer: int) -> dict[str, int]:
    """The bytes of a training, by purpose."""
    parts = plan_memory(replace(config, exit_layer=exit_layer), target).parts
    return {one.purpose: one.size for one in parts}


@pytest.mark.parametrize(
    "family", typical_where(TYPICAL.__contains__, quick_where(lambda n: n in ("llama", "gpt2"), sorted(FAMILIES)))
)
def test_weights_are_what_loading_takes(tmp_path: Path, family: str) -> None:
    target = open_target(str(save_family(tmp_path, family)))
    loaded = sum(parameter.nbytes for parameter in target.layers(dtype=torch.bfloat16).parameters())
    assert loaded == pytest.approx(
        weight_bytes(target.config, Storage(2, 64)), rel=0.02
    )  # a router may stay in float32


def test_a_matrix_with_two_names_is_held_once(tmp_path: Path) -> None:
    target = open_target(str(save_target(tmp_path, tied=True, kv_heads=2)))
    loaded = sum(parameter.nbytes for parameter in target.layers(dtype=torch.float32).parameters())
    assert loaded == weight_bytes(target.config, Storage(4, 64))


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2"])
def test_caches_are_what_decoding_takes(tmp_path: Path, family: str) -> None:
    """In passes of fixed shape, for texts as long as were planned."""
    target = open_target(str(save_family(tmp_path, family)))
    runtime, place = Graphed(), Storage(4, 100)
    runtime.prepare(place.positions, ())
    list(autoregressive(target.stack(dtype=torch.float32), random_prompt(60), max_new_tokens=40, runtime=runtime))
    (arena,) = runtime._arenas.values()
    assert arena.capacity == place.slots
    assert arena.second_cache._buffer is not None
    assert arena.second_cache._buffer.nbytes == cache_bytes(target.config, place)


def test_passes_write_no_more_than_is_planned(tmp_path: Path) -> None:
    """Hidden states and logits of the widest pass, whose size the vocabulary decides."""
    target = open_target(str(save_target(tmp_path, kv_heads=2)))
    runtime = Graphed()
    prompt = random_prompt(9) * 3  # what is looked up is found
    list(speculative(target.stack(dtype=torch.float32), PromptLookup(), prompt, max_new_tokens=20, runtime=runtime))
    (arena,) = runtime._arenas.values()
    written = sum(buffer.nbytes for buffer in arena.buffers.values() if buffer.is_floating_point())
    planned = pass_bytes(target.config, Storage(4, 100))
    assert 0 < written <= planned < 2 * written


@pytest.mark.parametrize("gpu", [False, True])
def test_a_plan_is_of_the_device_that_a_run_would_use(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """Unless another one is named, which need not be here. On a CPU the runtime has packed weights besides."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    llama_2(tie_word_embeddings=False).save_pretrained(tmp_path)
    shared: dict[str, Any] = {"target": str(tmp_path), "plan": True, "out_dir": str(tmp_path / "out")}
    config = EvaluateConfig(**shared, methods=LOOKUP)
    text = {**shared, "data": DataConfig(), "fit": FitConfig(steps=1)}
    here, other = ("cuda", "cpu") if gpu else ("cpu", "cuda")
    plans: dict[Callable[[], None], str] = {
        lambda: evaluate(config): here,
        lambda: evaluate(replace(config, device=other)): other,
        lambda: train_eagle3(Eagle3Config(**text)): here,
    }
    for plan, device in plans.items():
        plan()
        first, *lines = capsys.readouterr().out.splitlines()
        assert first.endswith(f" device={device}")
        weights = [float(line.split()[-2]) for line in lines if "weights" in line or "packed" in line]
        copies = 3 if device == "cpu" and "positions=" in first else 1
        assert weights == pytest.approx([68.98 * (2 if device == "cuda" else 4)] * copies, abs=0.03)
    train_early_exit(EesdConfig(**text))
    assert capsys.readouterr().out.splitlines()[0].endswith(f" device={here}")
    assert not (tmp_path / "out").exists()


def test_an_early_exit_beside_it(tmp_path: Path) -> None:
    """Its sessions have caches of their own."""
    path = save_target(tmp_path / "target")
    target, folder = open_target(str(path)), tmp_path / "drafter"
    drafter = save_exit(folder, path, LAYERS - 1)
    config = EvaluateConfig(checkpoint=str(folder), methods={"m": MethodConfig()}, dtype="float32")
    parts = {one.purpose: one.size for one in memory_plan.evaluation_memory(config, target)}
    assert parts["early_exit's weights"] == sum(parameter.nbytes for parameter in drafter.parameters())
    plain, own = parts["caches of plain decoding"], parts["early_exit's caches"]
    layer = cache_bytes(target.config, Storage(4, target.config.max_position_embeddings), layers=1)
    assert plain + layer < own < 2 * plain + layer


def test_activations_are_of_a_micro_batch() -> None:
    """And what is known of the target needs no layer of it."""
    parts = held(CONFIG, llama_2(70), 5)
    fewer = held(replace(CONFIG, fit=replace(CONFIG.fit, micro_batch_rows=1)), llama_2(70), 5)
    activations = list(parts.values())[2]
    assert CONFIG.fit.batch_rows * list(fewer.values())[2] == activations
    again = held(replace(CONFIG, fit=replace(CONFIG.fit, gradient_checkpointing=True)), llama_2(70), 5)
    assert list(again.values())[2] < activations / 2
    responses = DataConfig(source="local", path="responses-*.jsonl")
    cached = replace(CONFIG, objective="kl_tv", teacher="cached", data=responses)
    assert held(cached, llama_2(70), 5) == parts


IDS = torch.tensor([random_prompt(24)])
BATCH = {
    "input_ids": IDS, "labels": IDS.roll(-1, 1), "positions": torch.arange(24)[None],
    "documents": torch.zeros(1, 24, dtype=torch.long),
}  # fmt: skip


def require_allocated(path: Path, config: EesdConfig) -> None:
    """The plan of `config` for the target in `path` is what is read, trained and held after a step of training."""
    target, files = load_config(str(path)), open_tensors(str(path))
    config = replace(config, exit_layer=2)
    planned, read = empty_student(config, target)
    layers = range(target.num_hidden_layers) if config.online else exit_layers(target, 2)
    model = load_layers(files, target, layers, dtype=getattr(torch, config.frozen_dtype))
    assert files.bytes_read == 4 * read
    tokens = None if config.draft_vocabulary is None else torch.arange(config.draft_vocabulary)
    student = EarlyExitStudent(model, config, tokens)
    optimizer = build_optimizer(student, config.fit)
    student(**BATCH)["loss_sum"].backward()
    optimizer.step()
    learned = [p for p in student.parameters() if p.requires_grad]
    gradients = [p.grad for p in learned if p.grad is not None]
    moments = [m for state in optimizer.state.values() for m in state.values() if torch.is_tensor(m) and m.ndim]
    assert [p.shape for p in planned.parameters()] == [p.shape for p in student.parameters()]
    frozen, state, *_ = (one.size for one in plan_memory(config, target).parts)
    assert frozen == sum(p.nbytes for p in student.parameters() if not p.requires_grad)
    unused = sum(p.numel() for p in learned if p.grad is None)  # biases of routers, which choose but do not weigh
    assert unused < 1e-3 * sum(p.numel() for p in learned)
    assert state - 12 * unused == sum(t.nbytes for t in (*learned, *gradients, *moments))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError()])
def test_a_training_that_does_not_fit_says_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    path, data = save_target(tmp_path / "target"), write_corpus(tmp_path)
    config = distilling(path, data, tmp_path / "out")
    monkeypatch.setattr("outrider.train.core.driver.fit", Mock(side_effect=error))
    refusal(r"^out of memory .*activations of \d+ rows .*fit\.micro_batch_rows=1", train_early_exit, config)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), explain_out_of_memory(list):
        torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("train_head", [True, False])
@pytest.mark.parametrize("objective", ["cross_entropy", "forward_kl"])
@pytest.mark.slow
def test_the_plan_is_what_happens(tmp_path: Path, objective: str, train_head: bool, tied: bool) -> None:
    """With both optimizers, without a layer, with two, with a draft vocabulary, of several tokens in one pass."""
    path = save_target(tmp_path / "target", tied=tied)
    config = replace(CONFIG, objective=objective, train_head=train_head, frozen_dtype="float32")
    require_allocated(path, config)
    require_allocated(path, replace(config, fit=replace(config.fit, optimizer="muon")))
    require_allocated(path, replace(config, train_layer=False))
    require_allocated(path, replace(config, exit_depth=2))
    require_allocated(path, replace(config, draft_vocabulary=24, parallel=4))


@pytest.mark.parametrize(
    "family",
    typical_where(
        lambda name: name in TYPICAL or name == "ernie4_5_moe",
        quick_where(lambda name: name in ("ernie4_5_moe", "gpt2"), sorted(FAMILIES)),
    ),
)
def test_the_plan_of_a_family_is_what_happens(tmp_path: Path, family: str) -> None:
    """Learned positions, heads with a bias, layers of several sizes, experts."""
    path = save_family(tmp_path / "target", family)
    config = replace(CONFIG, frozen_dtype="float32")  # in 16 bits transformers keeps a few routers in 32
    for objective, train_head in (("cross_entropy", True), ("forward_kl", False)):
        require_allocated(path, replace(config, objective=objective, train_head=train_head))
