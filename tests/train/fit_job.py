"""A tiny model and data to fit; run as a script, one training process for the tests that need their own."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from outrider.base.wandb_config import WandbConfig
from outrider.draft_models.losses import IGNORE
from outrider.train.core.fit import fit
from outrider.train.core.training import Student
from outrider.train.settings.fit import FitConfig

VOCABULARY, WIDTH, LENGTH, ROWS = 23, 8, 6, 37


class TinyLayer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.out(torch.tanh(self.mix(hidden)))


class TinyModel(Student):
    """Frozen embedding, one trained layer, trained head."""

    def __init__(self, dtype: torch.dtype = torch.float64, delay: float = 0.0) -> None:
        super().__init__()
        self.delay = delay
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
            self.layer = TinyLayer()
            self.head = nn.Linear(WIDTH, VOCABULARY)
        self.to(dtype)

    def forward(self, input_ids: Tensor, labels: Tensor, positions: Tensor, documents: Tensor) -> dict[str, Tensor]:
        if self.training:
            time.sleep(self.delay)
        logits = self.head(self.layer(self.embedding(input_ids))).flatten(0, -2)
        logits = logits.double() if self.head.weight.dtype == torch.float64 else logits.float()
        flat = labels.flatten()
        return {"loss_sum": nn.functional.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="sum")}


def tiny_rows(count: int = ROWS) -> list[dict[str, Tensor]]:
    """Rows with very different numbers of supervised tokens, so that wrong normalisation shows."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for index in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.roll(-1)
        labels[1 + index % LENGTH :] = IGNORE
        zeros = torch.zeros(LENGTH, dtype=torch.long)
        rows.append({"input_ids": ids, "labels": labels, "positions": torch.arange(LENGTH), "documents": zeros})
    return rows


def tiny_config(**changes: object) -> FitConfig:
    """Eight steps of Muon in plain precision, logging and saving every second one."""
    options: dict[str, object] = {
        "steps": 8, "batch_rows": 8, "optimizer": "muon", "precision": "fp32", "lr": 0.01, "weight_decay": 0.1,
        "warmup": 2, "log_every": 2, "save_every": 2, "wandb": WandbConfig(mode="disabled"),
    }  # fmt: skip
    return FitConfig(**{**options, **changes})  # type: ignore[arg-type]


def main(out_dir: str, changes: str, delay: str) -> None:
    dtype = torch.float32 if "precision" in json.loads(changes) else torch.float64
    model = TinyModel(dtype, float(delay))
    torch.set_num_threads(1)
    fit(model, tiny_rows(), tiny_config(**json.loads(changes)), Path(out_dir))


if __name__ == "__main__":
    main(*sys.argv[1:])
