"""In which order a run sees its rows: a pure function of (seed, epoch), so that a resumed run continues it."""

from collections.abc import Iterator

from torch.utils.data import Sampler

from outrider.streams import Streams


def epoch_order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of `count` rows in one epoch: a pure function of its arguments."""
    return Streams(seed).arrays("row order", epoch).permutation(count).tolist()


class RowOrder(Sampler[int]):
    """Row indices of a whole run, epoch after epoch: step s takes rows [s · batch, (s + 1) · batch) of it."""

    def __init__(self, count: int, length: int, seed: int) -> None:
        self.count, self.length, self.seed = count, length, seed

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self.length, self.count):
            yield from epoch_order(self.count, self.seed, start // self.count)[: self.length - start]
