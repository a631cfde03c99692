"""The config of the training loop: what it makes of steps, rows, learning rates and the environment."""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from outrider.errors import UserError
from outrider.wandb_config import WandbConfig
from train.settings.fit import FitConfig

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


def test_steps_and_rows_of_a_process() -> None:
    config = FitConfig(epochs=1.5, batch_rows=12)
    assert config.total_steps(25) == 4  # 37.5 rows
    assert replace(config, epochs=0.01).total_steps(25) == 1
    assert FitConfig(steps=7).total_steps(25) == 7
    assert config.micro_rows(2) == 6
    assert replace(config, micro_batch_rows=3).micro_rows(2) == 3
    with pytest.raises(UserError, match=r"batch_rows=12: expected a multiple of the number of processes \(5\)"):
        config.micro_rows(5)
    with pytest.raises(UserError, match="micro_batch_rows=4: must divide batch_rows / processes = 12 / 2 = 6"):
        replace(config, micro_batch_rows=4).micro_rows(2)


def test_every_option_decides_the_weights_or_may_change_on_resume() -> None:
    config = FitConfig(steps=8)
    deciding = {
        "steps": 9, "batch_rows": 4, "optimizer": "muon", "lr": 0.5, "muon_lr": 0.5, "betas": (0.5, 0.5), "seed": 1,
        "weight_decay": 0.5, "warmup": 1, "schedule": "cosine", "max_grad_norm": 0.5, "precision": "fp32",
    }  # fmt: skip
    free = {
        "micro_batch_rows": 2, "gradient_checkpointing": True, "log_every": 1, "eval_every": 1, "save_every": 1,
        "keep_checkpoints": 1, "wandb": WandbConfig(mode="offline"),
    }  # fmt: skip
    assert {field.name for field in fields(FitConfig)} == {*deciding, *free, "epochs"}
    for name, value in deciding.items():
        assert replace(config, **{name: value}).deciding() != config.deciding(), name
    for name, value in free.items():
        assert replace(config, **{name: value}).deciding() == config.deciding(), name
    assert FitConfig(epochs=1).deciding() != FitConfig(epochs=2).deciding()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, r"steps=None: expected exactly one of steps and epochs"),
        ({"epochs": 1}, r"steps=8: expected exactly one of steps and epochs \(which is 1\)"),
        ({"steps": 0}, "steps=0: expected a number greater than or equal to 1"),
        ({"steps": None, "epochs": 0}, "epochs=0: expected a number greater than 0"),
        ({"batch_rows": 0}, "batch_rows=0: expected a number greater than or equal to 1"),
        ({"micro_batch_rows": 65}, r"micro_batch_rows=65: expected 1 to batch_rows \(64\)"),
        ({"optimizer": "sgd"}, "optimizer='sgd': expected 'adamw' or 'muon'"),
        ({"schedule": "step"}, "schedule='step': expected 'linear', 'cosine' or 'constant'"),
        ({"precision": "fp16"}, "precision='fp16': expected 'fast', 'bf16' or 'fp32'"),
        ({"lr": float("inf")}, "lr=inf: expected a finite number"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1\.0: expected a number less than 1"),
        ({"weight_decay": -1}, "weight_decay=-1: expected a number greater than or equal to 0"),
        ({"warmup": 9}, r"warmup=9: expected at most steps \(8\)"),
        ({"log_every": 0}, "log_every=0: expected a number greater than or equal to 1"),
        ({"save_every": 0}, "save_every=0: expected a number greater than or equal to 1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0: expected a number greater than or equal to 1"),
        ({"seed": -1}, "seed=-1: expected a number greater than or equal to 0"),
    ],
)
def test_impossible_options_are_named(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        FitConfig(**{"steps": 8, **changes})


def test_wandb_is_online_where_a_key_is_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert WandbConfig(mode="auto").resolved_mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert WandbConfig(mode="auto").resolved_mode() == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here:8080")
    assert WandbConfig(mode="auto").resolved_mode() == "offline"  # the key is for another host
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert WandbConfig(mode="auto").resolved_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert WandbConfig(mode="auto").resolved_mode() == "disabled"
    assert WandbConfig(mode="offline").resolved_mode() == "offline"
