"""The plan of a training: the paper's arithmetic, and what training then really reads and trains."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from data_prep.responses.plan import describe_plan as responses_plan
from data_prep.responses.tasks import Task
from data_prep.text.settings import DataConfig
from draft_models.early_exit.model import EarlyExitStudent, exit_layers
from draft_models.losses import loss_bytes
from draft_models.targets.architectures import load_config
from draft_models.targets.model_files import load_layers
from draft_models.targets.tensor_files import open_tensors
from inference.loading.memory_plan import planned_device
from outrider.errors import UserError
from tests.conf.test_experiments import composed
from tests.families import FAMILIES, TYPICAL, save_family
from tests.tiers import quick_where, typical_where
from tests.tiny import random_prompt, save_target
from train.core.optimizers import build_optimizer
from train.parts.plans import describe_plan, make_plan
from train.recipes.early_exit import train_early_exit
from train.settings.drafters import EesdConfig
from train.settings.fit import FitConfig

CONFIG = EesdConfig(target="t", data=DataConfig(), fit=FitConfig(steps=1), frozen_dtype="bfloat16")


def llama_2(size: int) -> LlamaConfig:
    if size == 70:
        shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        return LlamaConfig(**shape, num_key_value_heads=8, vocab_size=32000, dtype="float16")
    shape = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40}
    return LlamaConfig(**shape, vocab_size=32000, dtype="float16")


@pytest.mark.slow
def test_the_papers_own_arithmetic() -> None:
    """EESD Table 6: LLaMA-2-70B with N = 5 loads 5.6 B parameters and trains 1.12 B, 13B with N = 3 1.6 B and 481 M."""
    plan = make_plan(CONFIG, llama_2(70), 5)
    assert plan.read / 1e9 == pytest.approx(5.6, abs=0.1)
    assert plan.trained / 1e9 == pytest.approx(1.12, abs=0.005)
    assert plan.read_bytes == 2 * plan.read
    text = describe_plan(plan, 5, 80)
    assert text.startswith("plan exit_layer=5/80 read_parameters=5")
    assert "exit head: 0.262 B parameters, trained" in text
    smaller = make_plan(CONFIG, llama_2(13), 3)
    assert smaller.read / 1e9 == pytest.approx(1.6, abs=0.05)
    assert smaller.trained / 1e6 == pytest.approx(481, abs=1)


def test_exit_layers_are_counted_one_by_one() -> None:
    """Of several every one is trained, and none where there is no layer at all."""
    width, middle = 5120, 13824
    matrices = 4 * width * width + 3 * width * middle
    one, three = (make_plan(replace(CONFIG, exit_depth=depth), llama_2(13), 1) for depth in (1, 3))
    assert three.trained - one.trained == 2 * (matrices + 2 * width)
    with pytest.raises(UserError, match="exit_depth=2: expected 1 with train_layer=false"):
        replace(CONFIG, train_layer=False, exit_depth=2)


@pytest.mark.slow
def test_the_memory_is_counted_part_by_part() -> None:
    width, middle, keys, vocabulary = 8192, 28672, 1024, 32000
    layer = 2 * width * width + 2 * width * keys + 3 * width * middle + 2 * width
    head = vocabulary * width
    plan = make_plan(CONFIG, llama_2(70), 5)
    frozen, trained, hidden, loss, gradient, *_ = plan.device_bytes.values()
    assert frozen == 2 * (head + 5 * layer)
    assert trained == 4 * (1 + 1 + 2) * (layer + width + head)
    assert hidden == 4 * CONFIG.fit.batch_rows * CONFIG.seq_len * width
    assert loss == loss_bytes(vocabulary, vocabulary, planned_device())
    assert gradient == 4 * head
    alone = make_plan(replace(CONFIG, train_layer=False, train_head=False), llama_2(70), 5)
    assert alone.trained == width
    responses = DataConfig(source="local", path="responses-*.jsonl")
    cached = replace(CONFIG, objective="kl_tv", teacher="cached", data=responses)
    assert make_plan(cached, llama_2(70), 5) == plan  # what is known of the target needs no layer of it


@pytest.mark.parametrize(
    ("name", "size", "context"), [("vicuna_13b", 13, 2048), ("llama2_13b", 13, 4096), ("codellama_13b", 13, 16384)]
)
def test_experiments_of_13_billion_fit_a_gpu_of_80_gb(
    name: str, size: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with a batch of the longest prompts, and the training with the whole target beside it."""
    for module in ("data_prep.responses.plan", "train.parts.plans"):
        monkeypatch.setattr(f"{module}.planned_device", lambda: torch.device("cuda"))
    target = llama_2(size)
    target.max_position_embeddings = context
    answers = composed(f"generate_responses/{name}")
    longest = Task("0", "0", "vicuna", [1] * 64, upcoming=["x" * context] if name == "vicuna_13b" else [])
    said = responses_plan(answers, SimpleNamespace(config=target), [longest], context)
    assert 50 < float(re.search(r"device_gb=(\S+)", said)[1]) < 75
    training = composed(f"eesd/{name}")
    assert training.decode_prompts > 0
    plan = make_plan(training, target, 3)
    assert "the whole target, to decode with" in plan.device_bytes
    assert sum(plan.device_bytes.values()) < 60e9  # the exit's own activations come beside this


@pytest.mark.parametrize("objective", ["cross_entropy", "kl"])
def test_the_loss_of_a_large_vocabulary_is_in_the_plan(objective: str) -> None:
    """A chunk of logits over 262,144 tokens is half a gigabyte; the loss and the program are no more than 2."""
    target = llama_2(13)
    target.vocab_size, target.tie_word_embeddings, target.num_hidden_layers, target.hidden_size = 262_144, True, 2, 640
    config = replace(CONFIG, objective=objective, train_head=False)
    held = make_plan(config, target, 1).device_bytes
    loss = held["logits and the loss, some rows at a time"]
    assert 512 * 262_144 * 4 < loss < 1.2e9
    more = make_plan(replace(config, train_head=True), target, 1).device_bytes
    assert more["the head's gradient in the loss"] == 4 * 262_144 * 640
    assert more["logits and the loss, some rows at a time"] == loss


def require_allocated(path: Path, config: EesdConfig) -> None:
    """The plan of `config` for the target in `path` is what is read, trained and held after a step of training."""
    target, files = load_config(str(path)), open_tensors(str(path))
    plan = make_plan(config, target, 2)
    layers = range(target.num_hidden_layers) if config.online else exit_layers(target, 2)
    frozen_dtype = getattr(torch, config.frozen_dtype)
    model = load_layers(files, target, layers, dtype=frozen_dtype)
    assert plan.read_bytes == files.bytes_read
    student = EarlyExitStudent(
        model,
        2,
        train_head=config.train_head,
        train_layer=config.train_layer,
        objective=config.loss,
        draft_tokens=None if config.draft_vocabulary is None else torch.arange(config.draft_vocabulary),
    )
    optimizer = build_optimizer(student, config.fit)
    student(**BATCH)["loss_sum"].backward()
    optimizer.step()
    parameters = list(student.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    trained = [p for p in parameters if p.requires_grad]
    gradients = [p.grad for p in trained if p.grad is not None]
    moments = [m for state in optimizer.state.values() for m in state.values() if torch.is_tensor(m) and m.ndim]
    assert plan.trained == sum(p.numel() for p in trained)
    assert sum(p.parameters for p in plan.parts) == sum(p.numel() for p in parameters)
    held_frozen, held_trained, *_ = plan.device_bytes.values()
    assert held_frozen == sum(p.nbytes for p in frozen)
    unused = sum(p.numel() for p in trained if p.grad is None)  # biases of routers, which choose but do not weigh
    assert unused < 1e-3 * plan.trained
    assert held_trained - 12 * unused == sum(t.nbytes for t in (*trained, *gradients, *moments))


IDS = torch.tensor([random_prompt(24)])
BATCH = {
    "input_ids": IDS, "labels": IDS.roll(-1, 1), "positions": torch.arange(24)[None],
    "documents": torch.zeros(1, 24, dtype=torch.long),
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("train_head", [True, False])
@pytest.mark.parametrize("objective", ["cross_entropy", "kl"])
@pytest.mark.slow
def test_the_plan_is_what_happens(tmp_path: Path, objective: str, train_head: bool, tied: bool) -> None:
    path = save_target(tmp_path / "target", tied=tied)
    config = replace(CONFIG, objective=objective, train_head=train_head, frozen_dtype="float32")
    require_allocated(path, config)
    require_allocated(path, replace(config, fit=replace(config.fit, optimizer="muon")))
    require_allocated(path, replace(config, train_layer=False))


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
    for objective, train_head in (("cross_entropy", True), ("kl", False)):
        require_allocated(path, replace(config, objective=objective, train_head=train_head))


def test_the_target_that_is_decoded_with_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 69 B parameters in 16 bits, as on a GPU, and caches for its 4096 positions."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = replace(CONFIG, decode_prompts=8)
    (more,) = set(make_plan(config, llama_2(70), 5).device_bytes.items()) - set(
        make_plan(CONFIG, llama_2(70), 5).device_bytes.items()
    )
    assert more[0] == "the whole target, to decode with"
    assert more[1] / 1e9 == pytest.approx(138, rel=0.02)


def test_the_plan_of_a_small_head_is_what_happens(tmp_path: Path) -> None:
    path = save_target(tmp_path / "target")
    config = replace(CONFIG, frozen_dtype="float32", draft_vocabulary=24)
    require_allocated(path, config)
    target, all_tokens = load_config(str(path)), replace(config, draft_vocabulary=None)
    rows = target.vocab_size - 24
    assert make_plan(all_tokens, target, 2).trained - make_plan(config, target, 2).trained == rows * target.hidden_size
    shared = replace(config, train_head=False)
    require_allocated(path, shared)
    require_allocated(path, replace(shared, objective="kl"))


def test_the_command_plans_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """config.json is enough, and nothing is written."""
    llama_2(70).save_pretrained(tmp_path / "llama")
    out_dir = tmp_path / "out"
    train_early_exit(replace(CONFIG, target=str(tmp_path / "llama"), plan=True, out_dir=str(out_dir)))
    assert "trained_parameters=1117" in capsys.readouterr().out
    assert not out_dir.exists()
    assert json.loads((tmp_path / "llama/config.json").read_text())["num_hidden_layers"] == 80
