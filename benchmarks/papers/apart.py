"""MCSD without tree attention: the paths of a tree are sequences of a batch, each with the text's keys and values.

Both passes run the target's layers one by one over the same cache, so that they differ in nothing else.
"""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.draft_models.targets.attention import additive
from outrider.draft_models.targets.stack import LayerStack
from outrider.inference.core.rows import RoundRows, unpack
from outrider.inference.core.tree import chain_parents
from outrider.inference.shapes.shapes import full_shape
from papers.claims import Row
from papers.measuring import Asked, Bench

WIDTHS, EVERY = (8, 2, 1, 1), 16  # the tree of Table 4; tokens of the text between two pairs of passes


class Past:
    """A cache of the text's keys and values [1, heads, positions, head_dim], which every sequence of a batch gets."""

    def __init__(self) -> None:
        self.text: dict[int, tuple[Tensor, Tensor]] = {}
        self.filled = False

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if not self.filled:
            self.text[layer_idx] = key, value
            return key, value
        keys, values = (old.expand(len(key), -1, -1, -1) for old in self.text[layer_idx])
        return torch.cat([keys, key], 2), torch.cat([values, value], 2)


def logits_of(stack: LayerStack, past: Past, tokens: Tensor, parents: Sequence[int], length: int) -> Tensor:
    """Next-token logits [B, Q, V] of tokens [B, Q] after `length` tokens. parents: by row (−1: none), in all alike."""
    rows = RoundRows(parents)
    own = torch.from_numpy(unpack(rows.ancestors, len(rows)))
    visible = torch.cat([own.new_ones(len(rows), length), own], 1).to(stack.device)
    positions = (length + torch.tensor(rows.depths, device=stack.device)).expand(tokens.shape)
    stack.reserve(length + len(rows))
    masks = dict.fromkeys(stack.windows, additive(visible, stack.dtype))
    hidden = stack.run(stack.embed(tokens, positions), 0, len(stack.layers), stack.rotary(positions), masks, past)
    return stack.logits(hidden)


def both(stack: LayerStack, text: Sequence[int], drafted: Tensor, *, turn: int) -> tuple[list[Tensor], list[float]]:
    """The likeliest tokens after every row of a tree [1, n], and of its paths [leaves, depth], and both seconds.

    text: up to the root. drafted [nodes]: tokens of the tree. turn: odd ones run the paths first.
    """
    paths, past = full_shape(WIDTHS).paths, Past()
    place = {path: node for node, path in enumerate(paths, 1)} | {(): 0}
    *before, root = text
    logits_of(stack, past, torch.tensor([before], device=stack.device), chain_parents(0, len(before)), 0)
    past.filled = True
    nodes = torch.cat([drafted.new_tensor([root]), drafted]).to(stack.device)
    lines = [[place[leaf[:depth]] for depth in range(len(leaf) + 1)] for leaf in paths if len(leaf) == len(WIDTHS)]
    tree = nodes[None], [-1, *(place[path[:-1]] for path in paths)]
    apart = nodes[torch.tensor(lines, device=stack.device)], chain_parents(0, len(WIDTHS) + 1)
    found, seconds = {}, {}
    for which in (0, 1) if turn % 2 == 0 else (1, 0):
        began = time.perf_counter()
        found[which] = logits_of(stack, past, *(tree, apart)[which], len(before)).argmax(-1).cpu()
        seconds[which] = time.perf_counter() - began
    return [found[0], found[1]], [seconds[0], seconds[1]]


@torch.inference_mode()
def passes_apart(bench: Bench, row: Row, asked: Asked) -> Mapping[str, float]:
    """Seconds of passes over a tree, and over its paths apart, along the prompt's answer (see `Row.measure`)."""
    assert asked.answer is not None
    stack = bench.stack
    assert isinstance(stack, LayerStack)
    drafted = torch.tensor(asked.answer).repeat(len(full_shape(WIDTHS)))[: len(full_shape(WIDTHS))]
    cuts = range(0, len(asked.answer), EVERY)
    taken = [both(stack, (*asked.ids, *asked.answer[: cut + 1]), drafted, turn=turn)[1]
             for turn, cut in enumerate((0, 0, *cuts))][2:]  # the first two warm up  # fmt: skip
    tree, apart = map(sum, zip(*taken, strict=True))
    return {"tree_pass_seconds": tree, "apart_pass_seconds": apart}
