"""plan=true: what it says of weights, caches and a training is what loading, decoding and a step really take."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import LlamaConfig

from outrider.base.errors import UserError
from outrider.data_prep.text.settings import DataConfig
from outrider.draft_models.early_exit.model import exit_layers
from outrider.draft_models.targets.model_files import load_layers
from outrider.draft_models.targets.open_target import load_config, open_target
from outrider.draft_models.targets.tensor_files import open_tensors
from outrider.inference.batch.generate import describe_plan
from outrider.inference.batch.tasks import Task
from outrider.inference.core.decode import autoregressive, speculative
from outrider.inference.drafters.copies import PromptLookup
from outrider.inference.engines.graphs.cuda_graphs import Graphed
from outrider.inference.evaluate.compare import evaluate
from outrider.inference.loading import memory_plan
from outrider.inference.loading.memory_plan import Held, Place, cache_bytes, explained, pass_bytes, weight_bytes
from outrider.inference.settings.evaluate import EvaluateConfig
from outrider.inference.settings.method import MethodConfig
from outrider.train.core.optimizers import build_optimizer
from outrider.train.recipes.calibration import calibrate
from outrider.train.recipes.eagle3 import train_eagle3
from outrider.train.recipes.early_exit import EarlyExitStudent, train_early_exit
from outrider.train.settings.drafters import Eagle3Config, EesdConfig
from outrider.train.settings.fit import FitConfig
from outrider.train.students.early_exit import empty_exit, exit_plan
from tests.conf.test_experiments import composed
from tests.families import FAMILIES, TYPICAL, save_family
from tests.tiers import quick_where, typical_where
from tests.tiny import LAYERS, random_prompt, save_exit, save_target
from tests.train.jobs import calibrating, save_for_calibration

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
    parts = exit_plan(replace(config, exit_layer=exit_layer), target).held
    return {one.what: one.size for one in parts}


@pytest.mark.parametrize(
    "family", typical_where(TYPICAL.__contains__, quick_where(lambda n: n in ("llama", "gpt2"), sorted(FAMILIES)))
)
def test_weights_are_what_loading_takes(tmp_path: Path, family: str) -> None:
    target = open_target(str(save_family(tmp_path, family)))
    loaded = sum(parameter.nbytes for parameter in target.layers(dtype=torch.bfloat16).parameters())
    assert loaded == pytest.approx(weight_bytes(target.config, Place(2, 64)), rel=0.02)  # a router may stay in float32


def test_a_matrix_with_two_names_is_held_once(tmp_path: Path) -> None:
    target = open_target(str(save_target(tmp_path, tied=True, kv_heads=2)))
    loaded = sum(parameter.nbytes for parameter in target.layers(dtype=torch.float32).parameters())
    assert loaded == weight_bytes(target.config, Place(4, 64))


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
    """Unless another one is named, which need not be here. On a CPU the runtime has packed weights besides."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
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
        read, "early_exit's weights", "early_exit's caches",
    ]  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_an_early_exit_beside_it(tmp_path: Path) -> None:
    """Its sessions have caches of their own."""
    path = save_target(tmp_path / "target")
    target, folder = open_target(str(path)), tmp_path / "drafter"
    drafter = save_exit(folder, path, LAYERS - 1)
    config = EvaluateConfig(checkpoint=str(folder), methods={"m": MethodConfig()}, dtype="float32")
    parts = {one.what: one.size for one in memory_plan.evaluation_memory(config, target.config)}
    assert parts["early_exit's weights"] == sum(parameter.nbytes for parameter in drafter.parameters())
    plain, own = parts["caches of plain decoding"], parts["early_exit's caches"]
    layer = cache_bytes(target.config, Place(4, target.config.max_position_embeddings), layers=1)
    assert plain + layer < own < 2 * plain + layer


@pytest.mark.slow
def test_the_papers_own_arithmetic() -> None:
    """EESD Table 6: LLaMA-2-70B with N = 5 loads 5.6 B parameters and trains 1.12 B, 13B with N = 3 1.6 B and 481 M."""
    for size, exit_layer, read, learned in ((70, 5, 5.6, 1.12), (13, 3, 1.6, 0.481)):
        counts: Any = exit_plan(replace(CONFIG, exit_layer=exit_layer), llama_2(size)).facts
        assert float(counts["read_parameters"]) / 1e9 == pytest.approx(read, abs=0.1)
        assert float(counts["read_gb"]) == pytest.approx(2e-9 * int(counts["read_parameters"]), abs=0.01)
        assert float(counts["trained_parameters"]) / 1e9 == pytest.approx(learned, abs=0.005)


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


@pytest.mark.parametrize(("name", "context"), [("vicuna_13b", 2048), ("llama2_13b", 4096), ("codellama_13b", 16384)])
def test_experiments_of_13_billion_fit_a_gpu_of_80_gb(name: str, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers with a batch of the longest prompts, and the training with the whole target beside it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    target = llama_2(13, max_position_embeddings=context)
    longest = Task(
        "0",
        "0",
        "vicuna",
        [1] * 64,
        upcoming=[{"role": "user", "content": "x" * context}] if name == "vicuna_13b" else [],
    )
    said = describe_plan(composed(f"generate_responses/{name}"), target, [longest], context)
    assert 50 < float(re.search(r"device_gb=(\S+)", said)[1]) < 75
    parts = held(composed(f"eesd/{name}"), target, 3)
    assert parts["the whole target, to decode with"] > 26e9
    assert sum(parts.values()) < 80e9


@pytest.mark.parametrize("objective", ["cross_entropy", "forward_kl"])
def test_the_loss_of_a_large_vocabulary_is_in_the_plan(objective: str) -> None:
    """A chunk of logits over 262,144 tokens is half a gigabyte; the loss and the program are no more than 2."""
    target = llama_2(13, vocab_size=262_144, tie_word_embeddings=True, num_hidden_layers=2, hidden_size=640)
    config = replace(CONFIG, objective=objective, train_head=False)
    fewer, more = held(config, target, 1), held(replace(config, train_head=True), target, 1)
    loss, gradient = "logits and the loss, some rows at a time", "a matrix's gradient in the loss"
    assert 512 * 262_144 * 4 < fewer[loss] == more[loss] < 1.2e9
    assert more[gradient] == 4 * 262_144 * 640
    assert fewer[gradient] == 0


IDS = torch.tensor([random_prompt(24)])
BATCH = {
    "input_ids": IDS, "labels": IDS.roll(-1, 1), "positions": torch.arange(24)[None],
    "documents": torch.zeros(1, 24, dtype=torch.long),
}  # fmt: skip


def require_allocated(path: Path, config: EesdConfig) -> None:
    """The plan of `config` for the target in `path` is what is read, trained and held after a step of training."""
    target, files = load_config(str(path)), open_tensors(str(path))
    config = replace(config, exit_layer=2)
    planned, read = empty_exit(config, target)
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
    frozen, state, *_ = (one.size for one in exit_plan(config, target).held)
    assert frozen == sum(p.nbytes for p in student.parameters() if not p.requires_grad)
    unused = sum(p.numel() for p in learned if p.grad is None)  # biases of routers, which choose but do not weigh
    assert unused < 1e-3 * sum(p.numel() for p in learned)
    assert state - 12 * unused == sum(t.nbytes for t in (*learned, *gradients, *moments))


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


def test_a_cpu_that_has_not_enough_is_told_so_and_other_errors_stay() -> None:
    with pytest.raises(UserError, match="weights 3"), explained(lambda: [Held("weights", 3 * 10**9)]):
        torch.empty(2**60)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), explained(list):
        torch.ones(2, 3) @ torch.ones(2, 3)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), MemoryError()])
def test_a_training_that_does_not_fit_says_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr("outrider.train.core.driver.run_training", full)
    path = save_target(tmp_path / "target")
    with pytest.raises(UserError, match=r"activations of \d+ rows .* fit\.micro_batch_rows=1"):
        train_early_exit(replace(CONFIG, target=str(path), out_dir=str(tmp_path / "out")))
