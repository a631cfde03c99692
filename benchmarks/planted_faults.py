"""Faults planted into the runtime, and into nothing else: what a judgement of losslessness has to find."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from draft_models.target import LayerStack
from inference.cache import KVCache
from inference.layout import Layout, Rows


@contextmanager
def rope_scaled(factor: float) -> Iterator[None]:
    """Rotary frequencies times `factor`: at position n a phase is off by n · (factor − 1) radians."""
    reserve = LayerStack.reserve

    def reserve_scaled(stack: LayerStack, positions: int) -> None:
        rope: Any = stack._rotary_emb
        right = rope.inv_freq
        rope.inv_freq = right * factor
        try:
            reserve(stack, positions)
        finally:
            rope.inv_freq = right

    with patch.object(LayerStack, "reserve", reserve_scaled):
        yield


@contextmanager
def noisy_logits(size: float, chance: random.Random) -> Iterator[None]:
    """Every logit off by a normal number of standard deviation `size`."""
    logits, generator = LayerStack.logits, torch.Generator().manual_seed(chance.getrandbits(63))

    def noisy(stack: LayerStack, hidden: Tensor) -> Tensor:
        right = logits(stack, hidden)
        return (right.float() + size * torch.randn(right.shape, generator=generator)).to(right.dtype)

    with patch.object(LayerStack, "logits", noisy):
        yield


def _with_masks(change: Callable[[Layout, Tensor], None]) -> Any:
    """The masks of passes behind the prompt changed in place, [rows, keys]."""
    mask = Layout._mask

    def changed(layout: Layout, window: int | None, places: Tensor, dtype: torch.dtype) -> Tensor:
        built = mask(layout, window, places, dtype)
        if layout.base:
            change(layout, built[0, 0])
        return built

    return patch.object(Layout, "_mask", changed)


@contextmanager
def hidden_position(chance: random.Random) -> Iterator[None]:
    """Verification does not see one committed position, another one in every pass."""

    def hide(layout: Layout, mask: Tensor) -> None:
        mask[:, chance.randrange(layout.base)] = torch.finfo(mask.dtype).min

    with _with_masks(hide):
        yield


@contextmanager
def tree_mask_off_by_one() -> Iterator[None]:
    """In a tree every row sees the row before it as well, be it of another branch."""

    def widen(layout: Layout, mask: Tensor) -> None:
        if not layout.is_chain:
            for row in range(max(layout.start, 1), layout.stop):
                mask[row - layout.start, layout.base + row - 1] = 0

    with _with_masks(widen):
        yield


@contextmanager
def wrong_row_kept() -> Iterator[None]:
    """After a rejection the cache keeps a rejected row in place of the last accepted one."""
    keep = KVCache.keep

    def keep_wrong(cache: KVCache, base: int, rows: Sequence[int]) -> None:
        before = cache.length
        keep(cache, base, rows)
        if base and before > cache.length and cache._buffer is not None:
            cache._buffer[..., cache.length - 1, :] = cache._buffer[..., cache.length, :]

    with patch.object(KVCache, "keep", keep_wrong):
        yield


@contextmanager
def positions_off_by_one() -> Iterator[None]:
    """Rows drafted in a tree stand one position too far."""
    add = Rows.add

    def add_further(rows: Rows, parents: Sequence[int]) -> None:
        before = len(rows)
        add(rows, parents)
        if not rows.is_chain:
            rows.depths[before:] = [
                depth + (parent >= 0) for depth, parent in zip(rows.depths[before:], parents, strict=True)
            ]

    with patch.object(Rows, "add", add_further):
        yield


FAULTS: dict[str, Callable[[random.Random], Any]] = {
    "RoPE frequencies × 1.002": lambda chance: rope_scaled(1.002),
    "RoPE frequencies × 1.01": lambda chance: rope_scaled(1.01),
    "noise of 0.1 on every logit": lambda chance: noisy_logits(0.1, chance),
    "a committed position hidden from verification": hidden_position,
    "a wrong cache row after a rejection": lambda chance: wrong_row_kept(),
    "a mask off by one under a tree": lambda chance: tree_mask_off_by_one(),
    "positions off by one under a tree": lambda chance: positions_off_by_one(),
}


@contextmanager
def planted(name: str | None, seed: int, stack: LayerStack) -> Iterator[None]:
    """Inside, the runtime has the fault called `name` (None: none); `stack` forgets tables that it made before."""
    with ExitStack() as faults:
        if name is not None:
            faults.enter_context(FAULTS[name](random.Random(f"{name} {seed}")))
        stack.cos = stack.sin = stack.cos[:0]
        try:
            yield
        finally:
            stack.cos = stack.sin = stack.cos[:0]
