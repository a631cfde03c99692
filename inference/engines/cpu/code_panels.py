# mypy: allow-untyped-defs
"""Stored rows of quantised weights laid out in panels, as `by_codes` reads them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.base.compiled import kept
from outrider.draft_models.formats.gguf_codes import (
    KINDS,
    LONGEST,
    MOST_GROUPS,
    NUMBERS,
    CodedRows,
    in_threads,
    unpack,
)
from outrider.inference.engines.cpu.by_codes import PanelBlock
from outrider.inference.engines.cpu.large_pages import in_large_pages
from outrider.inference.engines.cpu.vectors import PANEL


@kept
def _in_one(codes, bits):
    """The codes of 1, 2 or 4 `bits` in each 16 of a number's 64, side by side: the first in the lowest bits."""
    apart = np.uint64(16 - bits)
    two = codes | codes >> apart
    return (two | two >> (apart + apart)) & np.uint64((1 << (4 * bits)) - 1)


@kept
def _fill_panels(number, kind, header, raw, panels):
    """Lay out rows of blocks [16 · panels, blocks, bytes] as panels [panels, blocks, bytes of a panel's block]."""
    codes = np.zeros(LONGEST, np.uint8)
    scales, minima = np.zeros(MOST_GROUPS, np.uint8), np.zeros(MOST_GROUPS, np.uint8)
    eights, per_group = codes.view(np.uint64), kind.group // 8
    high_bits, high_mask = max(0, kind.bits - 4), np.uint64(0x0003000300030003)
    size = PANEL * kind.group * kind.bits // 32  # of a group's codes, in numbers of 32 bits
    lows = kind.group // 8 if kind.bits < 8 else kind.group // 4  # lines of the lower bits
    word, byte = np.uint64(16), np.uint64(8)
    for panel in range(panels.shape[0]):
        for block in range(raw.shape[1]):
            out = panels[panel, block]
            out[:] = 0
            words = out[header:].view(np.uint32)  # the two inputs of a pair for each output
            for lane in range(PANEL):
                stored = raw[panel * PANEL + lane, block]
                first, second = unpack(number, stored, codes, scales, minima)
                out[2 * lane], out[2 * lane + 1] = stored[first], stored[first + 1]
                after = 2 * PANEL
                if second >= 0:
                    out[after + 2 * lane], out[after + 2 * lane + 1] = stored[second], stored[second + 1]
                    after += 2 * PANEL
                for group in range(kind.groups):
                    if kind.groups > 1:
                        out[after + group * PANEL + lane] = scales[group]
                        if second >= 0:
                            out[after + (kind.groups + group) * PANEL + lane] = minima[group]
                    to = words[group * size + lane :]
                    for index in range(per_group):
                        eight = eights[group * per_group + index]  # codes, four pairs
                        if kind.bits == 8:
                            for half in range(2):
                                four = eight >> np.uint64(32 * half)
                                swapped = (
                                    (four & np.uint64(0xFF0000FF))
                                    | (four >> byte & np.uint64(0xFF00))
                                    | ((four & np.uint64(0xFF00)) << byte)
                                )
                                to[PANEL * (2 * index + half)] = np.uint32(swapped)
                            continue
                        low = eight & np.uint64(0x0F0F0F0F0F0F0F0F)
                        even, odd = low & np.uint64(0x000F000F000F000F), low >> byte & np.uint64(0x000F000F000F000F)
                        to[PANEL * index] = np.uint32(_in_one(even, 4) | _in_one(odd, 4) << word)
                        if high_bits > 0:
                            high = eight >> np.uint64(4)
                            pairs = (
                                _in_one(high & high_mask, high_bits)
                                | _in_one(high >> byte & high_mask, high_bits) << word
                            )
                            per_line = 4 // high_bits  # such numbers, of four pairs each
                            by = np.uint32(4 * high_bits * (index % per_line))
                            to[PANEL * (lows + index // per_line)] |= np.uint32(pairs) << by


def code_table(parts: Sequence[CodedRows], function_of: Callable[[int], int]) -> Tensor:
    """int64 [2 · panels]: of each panel of `parts`, one after another, its address and `function_of` its kind's number.

    Lays out those of the parts that are not `packed` yet. The addresses hold as long as the parts do.
    """
    tables = []
    for part in parts:
        if part.packed is None:
            part.packed = code_panels(part.kind, part.raw)
            part.forget()
        addresses = part.packed.data_ptr() + part.packed[0].nbytes * torch.arange(len(part.packed))
        tables.append(torch.stack([addresses, torch.full_like(addresses, function_of(NUMBERS[part.kind]))], 1))
    return torch.cat(tables).flatten()


def code_panels(name: str, raw: Tensor) -> Tensor:
    """Stored rows, uint8 [outputs, bytes], as panels uint8 [outputs / PANEL, blocks, `PanelBlock.size`]."""
    kind, number, block = KINDS[name], NUMBERS[name], PanelBlock(KINDS[name])
    blocks = raw.view(len(raw), -1, kind.stored)
    panels = in_large_pages(torch.empty(len(raw) // PANEL, blocks.shape[1], block.size, dtype=torch.uint8))
    stored, out = blocks.numpy(), panels.numpy()

    def fill(begin: int, end: int) -> None:
        _fill_panels(number, kind, block.header, stored[begin * PANEL : end * PANEL], out[begin:end])

    in_threads(fill, len(panels), PANEL * blocks.shape[1] * kind.inputs)
    return panels
