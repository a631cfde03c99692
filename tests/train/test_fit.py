"""The training loop: exact normalisation, checkpoints that are complete or absent (resuming: test_fit_resume.py)."""

import math
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import default_collate

from outrider.base.errors import UserError
from outrider.base.machine import fast_dtype
from outrider.base.wandb_config import WandbConfig
from outrider.draft_models.losses import IGNORE
from outrider.train.core import run_dir
from outrider.train.core.engine import TrainingEngine
from outrider.train.core.fit import fit
from outrider.train.core.loop import epoch_order, step_rows
from outrider.train.core.optimizers import Float32Muon, MuonAdamW, build_optimizer, layer_matrices
from outrider.train.core.progress import TrainingLog, start_wandb
from outrider.train.core.sharding import WEIGHTS_FILE, trained_parameters
from outrider.train.settings.fit import FitConfig
from tests.full_disk import largest_file
from tests.refusals import refusal
from tests.train.fit_job import ROWS, TinyModel, tiny_config, tiny_rows
from tests.train.fit_runs import fit_tiny, trained_weights
from tests.train.jobs import log

TRAINED = {"layer.mix.weight", "layer.mix.bias", "layer.out.weight", "head.weight", "head.bias"}


def _plain_loop(steps=8, batch=8, lr=0.01, **changes):
    """The loop written down: AdamW on the mean loss per supervised token of each batch."""
    model, rows, config = TinyModel(), tiny_rows(), tiny_config(**changes)
    order = [i for epoch in range(3) for i in epoch_order(len(rows), config.seed, epoch)]
    trained = list(trained_parameters(model).values())
    decayed = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay}]
    vectors = [{"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decayed + vectors, betas=config.betas)
    for step in range(steps):
        inputs = default_collate([rows[i] for i in order[step * batch : (step + 1) * batch]])
        loss = model(**inputs)["loss_sum"] / (inputs["labels"] != IGNORE).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = lr * config.lr_scale(step, steps)
        optimizer.step()
        optimizer.zero_grad()
    return trained_weights(model)


@pytest.mark.parametrize(("micro", "clip"), [(1, 1.0), (4, 0.05), (8, 0.0)])
def test_any_accumulation_is_the_plain_loop(tmp_path, micro, clip):
    options = {"max_grad_norm": clip, "seed": 3}  # not the default: the order of the rows is the seed's
    model, _ = fit_tiny(tmp_path, optimizer="adamw", micro_batch_rows=micro, **options)
    torch.testing.assert_close(trained_weights(model), _plain_loop(**options), rtol=1e-9, atol=1e-12)


def test_loss_line_is_the_mean_per_supervised_token(tmp_path, capsys):
    """The first step has a line of its own; after it a line has all steps since the last one."""
    _, _ = fit_tiny(tmp_path, steps=3, log_every=3, batch_rows=4, micro_batch_rows=1, lr=1e-12, muon_lr=1e-12)
    model, rows = TinyModel(), tiny_rows()
    batch = default_collate([rows[i] for i in step_rows(ROWS, 4, 0, 1) + step_rows(ROWS, 4, 0, 2)])
    expected = float(model(**batch)["loss_sum"] / (batch["labels"] != IGNORE).sum())
    assert [entry["step"] for entry in log(tmp_path)] == [1, 3]
    assert log(tmp_path)[1]["loss"] == pytest.approx(expected, rel=1e-6)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step=3"))
    assert line.startswith(f"step=3/3 loss={expected:.4f} lr=")
    assert [part.split("=")[0] for part in line.split()] == ["step", "loss", "lr", "tokens_per_s", "grad_norm", "eta"]


def test_padding_is_no_token_of_the_speed(tmp_path):
    report = TrainingLog(SimpleNamespace(reduce=lambda sums, _: sums), tmp_path, range(2))
    report.add(torch.tensor(1.5), {"labels": torch.tensor([5, IGNORE, IGNORE]), "documents": torch.tensor([0, 0, -1])})
    assert report.drain() == (1.5, 1, 2)


def test_bf16_is_autocast_while_training_over_float32_masters(tmp_path):
    """And fast is bf16 where the CPU has instructions for it."""
    seen = []

    class Watched(TinyModel):
        def forward(self, **inputs):
            seen.append(self.head(self.embedding(inputs["input_ids"])).dtype)
            return super().forward(**inputs)

    expected = {"fp32": torch.float32, "bf16": torch.bfloat16, "fast": fast_dtype(torch.device("cpu"))}
    for precision, dtype in expected.items():
        model, _ = fit_tiny(tmp_path / precision, Watched(torch.float32), steps=2, precision=precision)
        assert set(seen) == {dtype}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        seen.clear()
        model(**default_collate(tiny_rows(2)))
        assert seen.pop() == torch.float32  # of the loop nothing is left


def test_the_launchers_precision_is_not_taken_silently(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    fit_tiny(tmp_path, steps=1, warmup=0)
    assert "warning: mixed_precision=fp16 in the launcher's config has no effect" in capsys.readouterr().err


def test_row_order_is_a_function_of_seed_and_epoch():
    assert epoch_order(50, 1, 0) == epoch_order(50, 1, 0)
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    order = [row for step in range(5) for row in step_rows(10, 5, 3, step)]
    assert len(order) == 25
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10))
    assert order[8:24] == [row for step in range(2, 6) for row in step_rows(10, 4, 3, step)]  # across epochs


def test_only_what_is_trained_is_saved(tmp_path):
    model = TinyModel()
    frozen = model.embedding.weight.clone()
    fit_tiny(tmp_path, model)
    assert load_file(tmp_path / "checkpoint-8" / WEIGHTS_FILE).keys() == TRAINED
    assert torch.equal(model.embedding.weight, frozen)
    moments = torch.load(tmp_path / "checkpoint-8" / "optimizer.bin", weights_only=True)["state"]
    assert len(moments) == len(TRAINED)


def test_old_checkpoints_are_dropped(tmp_path):
    fit_tiny(tmp_path, steps=12, keep_checkpoints=3)
    assert [p.name for p in run_dir.checkpoints(tmp_path)] == ["checkpoint-8", "checkpoint-10", "checkpoint-12"]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    def fill(_model, step):
        if step == 6:  # from now on no file may grow beyond this many bytes
            disk.enter_context(largest_file(1024))
        return {}

    failed = pytest.raises(UserError, match=r"step 6 could not be written .*checkpoint-4 is intact")
    with failed, ExitStack() as disk:
        fit_tiny(tmp_path, evaluate=fill, eval_every=2)
    assert [p.name for p in run_dir.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    _, result = fit_tiny(tmp_path, resume=True)
    assert result.resumed_from == 4


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    fit_tiny(tmp_path)
    model = TinyModel()
    model.head = nn.Linear(8, 24).double()
    refusal(r"does not fit the model to train; they differ in head\.bias", fit_tiny, tmp_path, model, resume=True)


class _Times(TinyModel):
    """A factor of the loss in each forward."""

    def __init__(self, *factors):
        super().__init__()
        self.factors = iter(factors)

    def forward(self, **inputs):
        return {"loss_sum": super().forward(**inputs)["loss_sum"] * next(self.factors)}


@pytest.mark.parametrize(("factors", "message"), [
    ((1, 1, 1, 1, math.nan), r"step 5: loss=nan.*checkpoint-4 is intact"),
    ((1, 1, 1, 1, 1e200), r"step 5: loss=.*, grad_norm=inf is not finite"),  # its norm has no finite square
])  # fmt: skip
def test_a_loss_or_gradient_that_is_not_finite_stops_before_the_update(tmp_path, factors, message):
    model = _Times(*factors)
    refusal(message, fit_tiny, tmp_path, model)
    saved = load_file(tmp_path / "checkpoint-4" / WEIGHTS_FILE)
    torch.testing.assert_close(trained_weights(model), saved, rtol=0, atol=0)


def test_what_cannot_be_trained_is_said(tmp_path):
    refusal("no rows", fit, TinyModel(), [], tiny_config(), tmp_path)
    rows = [{**row, "labels": torch.full_like(row["labels"], IGNORE)} for row in tiny_rows()]
    refusal("step 1: no supervised token in the batch", fit, TinyModel(), rows, tiny_config(), tmp_path)
    refusal("nothing to train", fit_tiny, tmp_path, TinyModel().requires_grad_(False), optimizer="adamw")
    refusal("gradient_checkpointing=true", fit_tiny, tmp_path, gradient_checkpointing=True)
    (tmp_path / "file").write_text("")
    refusal(r"out_dir=.*cannot be written", fit_tiny, tmp_path / "file" / "run")


def test_evaluation_runs_when_due_and_at_the_end(tmp_path):
    seen = []

    def evaluate(model, step):
        assert not model.training
        assert not torch.is_grad_enabled()
        assert step == (3, 6, 8)[len(seen)]
        seen.append(model.head.weight.detach().clone())
        return {"count": len(seen)}

    model, result = fit_tiny(tmp_path, evaluate=evaluate, eval_every=3, log_every=3)
    for name, first in (("eval_count", []), ("loss", [1])):
        assert [e["step"] for e in log(tmp_path) if name in e] == [*first, 3, 6, 8]
    assert result.metrics == {"count": 3}
    assert model.training
    assert torch.equal(seen[-1], model.head.weight)


def test_a_resumed_run_continues_its_wandb_curves(tmp_path, monkeypatch):
    asked = []

    def init(**options):
        asked.append((options["id"], options["resume"], options["mode"]))
        return SimpleNamespace(id="abc")

    def update(values, **_):
        asked[-1] += (values["seed"],)

    online, disabled = WandbConfig(mode="online"), WandbConfig(mode="disabled")
    accelerators = [Accelerator(log_with="wandb" if online.is_on() else None) for _ in range(2)]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, config=SimpleNamespace(update=update)))
    for accelerator in accelerators:
        start_wandb(accelerator, online, tmp_path, {"seed": 7})
    assert asked == [(None, None, "online", 7), ("abc", "allow", "online", 7)]
    without = Accelerator(log_with="wandb" if disabled.is_on() else None)
    assert start_wandb(without, disabled, tmp_path, {}) is None
    assert without.trackers == []


def test_wandb_disabled_does_without_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # it is not there
    fit_tiny(tmp_path, steps=2)
    assert [entry["step"] for entry in log(tmp_path)] == [1, 2]
    with pytest.raises(UserError, match=r"wandb\.mode: wandb is not installed; pip install wandb, or disabled"):
        fit_tiny(tmp_path / "offline", steps=2, wandb=WandbConfig(mode="offline"))


SHAPES = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,
}


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize(("warmup", "rising"), [(0, 0), (3, 3), (0.22, 5)])  # 0.22 of 20 steps, rounded up
def test_the_learning_rate_rises_and_then_follows_its_schedule(schedule: str, warmup: float, rising: int) -> None:
    config = FitConfig(steps=20, warmup=warmup, schedule=schedule)
    scale = [config.lr_scale(step, 20) for step in range(21)]
    assert scale[:rising] == pytest.approx([(step + 1) / (rising + 1) for step in range(rising)])
    left = 20 - rising
    assert scale[rising:] == pytest.approx([SHAPES[schedule](step / left) for step in range(left + 1)])


@pytest.mark.parametrize("length", [{"epochs": 4}, {"steps": 1000}])  # minutes end the second one
def test_a_warmup_in_steps_leaves_half_of_a_short_run(length: dict[str, int]) -> None:
    scale = [FitConfig(warmup=200, **length).lr_scale(step, 60) for step in range(61)]
    assert (scale[30], scale[60]) == (1.0, 0.0)
    assert FitConfig(steps=60, warmup=50).lr_scale(30, 60) == 31 / 51  # of a run that has all its steps


def test_steps_and_rows_of_a_process() -> None:
    config = FitConfig(epochs=1.5, batch_rows=12)
    assert config.total_steps(25) == 4  # 37.5 rows
    assert replace(config, epochs=0.01).total_steps(25) == 1
    assert FitConfig(steps=7).total_steps(25) == 7
    assert config.micro_rows(2) == 6
    assert replace(config, micro_batch_rows=3).micro_rows(2) == 3
    refusal(r"batch_rows=12: expected a multiple of the number of processes \(5\)", config.micro_rows, 5)
    with pytest.raises(UserError, match="micro_batch_rows=4: must divide batch_rows / processes = 12 / 2 = 6"):
        replace(config, micro_batch_rows=4).micro_rows(2)


def test_wandb_is_online_where_a_key_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert WandbConfig(mode="auto").resolve_mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert WandbConfig(mode="auto").resolve_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here:8080")
    assert WandbConfig(mode="auto").resolve_mode() == "offline"  # the key is for another host
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert WandbConfig(mode="auto").resolve_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert WandbConfig(mode="auto").resolve_mode() == "disabled"
    assert WandbConfig(mode="offline").resolve_mode() == "offline"


def test_muon_takes_the_layers_matrices_and_nothing_else():
    model = TinyModel()
    assert {id(p) for p in layer_matrices(model)} == {id(model.layer.mix.weight), id(model.layer.out.weight)}
    refusal("optimizer=muon", build_optimizer, model.head, tiny_config())


def _train_a_little(model, optimizer, seed, steps=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in trained_parameters(model).values():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        optimizer.step()


def test_muon_adamw_is_muon_and_adamw():
    """Torch's Muon where bfloat16 is quick, else the one in float32."""
    ours, theirs = TinyModel(), TinyModel()
    config = tiny_config()
    optimizer = build_optimizer(ours, config)
    assert isinstance(optimizer, MuonAdamW)
    matrices = layer_matrices(theirs)
    taken = {id(p) for p in matrices}
    rest = [p for p in trained_parameters(theirs).values() if id(p) not in taken]
    muon = torch.optim.Muon if fast_dtype(torch.device("cpu")) == torch.bfloat16 else Float32Muon
    separate = [
        muon(matrices, lr=config.muon_lr, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW([p for p in rest if p.ndim > 1], lr=config.lr, betas=config.betas, weight_decay=0.1),
        torch.optim.AdamW([p for p in rest if p.ndim < 2], lr=config.lr, betas=config.betas, weight_decay=0.0),
    ]
    _train_a_little(ours, optimizer, seed=1)
    _train_a_little(theirs, type("All", (), {"step": lambda self: [part.step() for part in separate]})(), seed=1)
    torch.testing.assert_close(trained_weights(ours), trained_weights(theirs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(5, 12), (12, 5), (6, 6)])
def test_muon_in_float32_is_the_polynomial_of_the_singular_values(shape):
    """And torch's, which takes the same steps, is off by what bfloat16 rounds."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    given = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "adjust_lr_fn": "original"}
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Float32Muon([ours], **given), torch.optim.Muon([theirs], **given)]
    a, b, c = optimizers[0].defaults["ns_coefficients"]
    expected, momentum = start.double(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(3):
        ours.grad = theirs.grad = torch.randn(shape, generator=generator)
        momentum = 0.9 * momentum + 0.1 * ours.grad.double()
        left, values, right = torch.linalg.svd(0.9 * momentum + 0.1 * ours.grad.double(), full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = a * values + b * values**3 + c * values**5
        scale = max(1, shape[0] / shape[1]) ** 0.5
        expected = 0.98 * expected - 0.1 * scale * left @ values.diag() @ right
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0.02)
    assert not torch.allclose(theirs.double(), expected, rtol=0, atol=1e-4)


def test_a_schedule_scales_every_rate_for_itself():
    config = tiny_config(lr=0.01, muon_lr=0.04)
    engine = TrainingEngine(TinyModel(), config)
    for scale in (0.5, 0.25):
        engine.set_rates(scale)
        rates = {id(p): group["lr"] for group in engine.optimizer.param_groups for p in group["params"]}
        matrices = {id(p) for p in layer_matrices(engine.model)}
        assert rates.keys() > matrices
        assert all(rate == scale * (0.04 if p in matrices else 0.01) for p, rate in rates.items())
