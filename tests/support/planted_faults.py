"""Faults planted into the runtime only, which a judgement of losslessness has to find."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.cache import KVCache
from outrider.inference.core.rows import Masks, RoundRows, RowLayout


@contextmanager
def rope_scaled(factor: float) -> Iterator[None]:
    """Rotary frequencies times `factor`: at position n a phase is off by n · (factor − 1) radians."""
    reserve = LayerStack.reserve

    def reserve_scaled(stack: LayerStack, positions: int) -> None:
        (rope,) = stack._rotary
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
    """Every logit plus a normal random number of standard deviation `size`."""
    logits, generator = LayerStack.logits, torch.Generator().manual_seed(chance.getrandbits(63))

    def noisy(stack: LayerStack, hidden: Tensor) -> Tensor:
        right = logits(stack, hidden)
        return (right.float() + size * torch.randn(right.shape, generator=generator)).to(right.dtype)

    with patch.object(LayerStack, "logits", noisy):
        yield


def _with_masks(change: Callable[[RowLayout, Tensor], None]) -> Any:
    """Change the masks [rows, keys] of passes after the prompt in place."""
    masks = RowLayout.masks

    def changed(layout: RowLayout, windows: Sequence[int | None], device: torch.device, dtype: torch.dtype) -> Masks:
        built = masks(layout, windows, device, dtype)
        for mask in {id(mask): mask for mask in built.values()}.values():  # one mask may be shared by several windows
            if layout.base and isinstance(mask, Tensor):
                change(layout, mask[0, 0])
        return built

    return patch.object(RowLayout, "masks", changed)


@contextmanager
def hidden_position(chance: random.Random) -> Iterator[None]:
    """Verification does not attend to one committed position, a different one in every pass."""

    def hide(layout: RowLayout, mask: Tensor) -> None:
        mask[:, chance.randrange(layout.base)] = torch.finfo(mask.dtype).min

    with _with_masks(hide):
        yield


@contextmanager
def tree_mask_off_by_one() -> Iterator[None]:
    """In a tree every row also attends to the row before it, even one of another branch."""

    def widen(layout: RowLayout, mask: Tensor) -> None:
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
        if base and before > cache.length:
            for kept in itertools.chain.from_iterable(cache.content(cache.length + 1)):
                kept[:, :, -2] = kept[:, :, -1]

    with patch.object(KVCache, "keep", keep_wrong):
        yield


@contextmanager
def positions_off_by_one() -> Iterator[None]:
    """Rows drafted in a tree have positions that are too large by one."""
    add = RoundRows.add

    def add_further(rows: RoundRows, parents: Sequence[int]) -> None:
        before = len(rows)
        add(rows, parents)
        if not rows.is_chain:
            rows.depths[before:] = [
                depth + (parent >= 0) for depth, parent in zip(rows.depths[before:], parents, strict=True)
            ]

    with patch.object(RoundRows, "add", add_further):
        yield


@dataclass(frozen=True)
class Fault:
    """plant: given a generator, a context in which the runtime has the fault; reaches: passes | rounds | trees."""

    plant: Callable[[random.Random], Any]
    reaches: str


FAULTS = {
    "RoPE frequencies × 1.002": Fault(lambda chance: rope_scaled(1.002), "passes"),
    "RoPE frequencies × 1.01": Fault(lambda chance: rope_scaled(1.01), "passes"),
    "noise of 0.1 on every logit": Fault(lambda chance: noisy_logits(0.1, chance), "passes"),
    "a committed position hidden from verification": Fault(hidden_position, "rounds"),
    "a wrong cache row after a rejection": Fault(lambda chance: wrong_row_kept(), "rounds"),
    "a mask off by one under a tree": Fault(lambda chance: tree_mask_off_by_one(), "trees"),
    "positions off by one under a tree": Fault(lambda chance: positions_off_by_one(), "trees"),
}
REACHED = {  # arms by what they do: plain decoding has no rounds, prompt lookup drafts no trees
    "passes": ("autoregressive", "prompt_lookup", "tree"),
    "rounds": ("prompt_lookup", "tree"),
    "trees": ("tree",),
}


@contextmanager
def planted(name: str | None, seed: int, stack: LayerStack) -> Iterator[None]:
    """A context in which the runtime has the fault `name` (None: none); `stack` drops tables that it cached."""
    with ExitStack() as faults:
        if name is not None:
            faults.enter_context(FAULTS[name].plant(random.Random(f"{name} {seed}")))
        stack._reserved = 0
        try:
            yield
        finally:
            stack._reserved = 0
