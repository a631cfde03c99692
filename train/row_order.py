"""In which order a run sees its rows: a pure function of (seed, epoch), so that a resumed run continues it."""

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of `count` rows in one epoch: a pure function of its arguments."""
    # hashed, because a CPU generator looks at 32 bits of its seed only
    mixed = int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(mixed)
    return torch.randperm(count, generator=generator).tolist()


class RowOrder(Sampler[int]):
    """Row indices of a whole run, epoch after epoch: step s takes rows [s · batch, (s + 1) · batch) of it."""

    def __init__(self, count: int, length: int, seed: int) -> None:
        self.count, self.length, self.seed = count, length, seed

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.length, self.count):
            yield from epoch_order(self.count, self.seed, start // self.count)[: self.length - start]
