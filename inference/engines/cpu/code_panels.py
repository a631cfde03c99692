# mypy: allow-untyped-defs
"""Stored rows of quantised weights laid out in panels, as `by_codes` reads them."""

from collections.abc import Sequence

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
from outrider.inference.engines.cpu.vectors import PANEL


@kept
def _fill_panels(number, kind, header, raw, panels):
    """Lay out rows of blocks [16 · panels, blocks, bytes] as panels [panels, blocks, bytes of a panel's block]."""
    row_codes, codes = np.zeros(LONGEST, np.uint8), np.zeros((LONGEST, PANEL), np.uint8)
    scales, minima = np.zeros((PANEL, MOST_GROUPS), np.uint8), np.zeros((PANEL, MOST_GROUPS), np.uint8)
    high_bits = np.uint32(0 if kind.bits == 8 else kind.bits - 4)
    low_bits = np.uint32(8 if kind.bits == 8 else 4)
    mask, per_low, per_high = np.uint8((1 << low_bits) - 1), 16 // low_bits, 16 // max(np.uint32(1), high_bits)
    pairs, size = kind.group // 2, PANEL * kind.group * kind.bits // 32  # in numbers of 32 bits
    for panel in range(panels.shape[0]):
        for block in range(raw.shape[1]):
            out = panels[panel, block]
            out[:] = 0
            for lane in range(PANEL):
                stored = raw[panel * PANEL + lane, block]
                first, second = unpack(number, stored, row_codes, scales[lane], minima[lane])
                for i in range(kind.group * kind.groups):
                    codes[i, lane] = row_codes[i]
                out[2 * lane], out[2 * lane + 1] = stored[first], stored[first + 1]
                after = 2 * PANEL
                if second >= 0:
                    out[after + 2 * lane], out[after + 2 * lane + 1] = stored[second], stored[second + 1]
                    after += 2 * PANEL
                if kind.groups > 1:
                    for group in range(kind.groups):
                        out[after + group * PANEL + lane] = scales[lane, group]
                        if second >= 0:
                            out[after + (kind.groups + group) * PANEL + lane] = minima[lane, group]
            words = out[header:].view(np.uint32)  # the two inputs of a pair for each output
            for group in range(kind.groups):
                for pair in range(pairs):
                    first_codes, second_codes = (
                        codes[group * kind.group + 2 * pair],
                        codes[group * kind.group + 2 * pair + 1],
                    )
                    to = words[group * size + PANEL * (pair // per_low) :]
                    by = low_bits * np.uint32(pair % per_low)
                    for lane in range(PANEL):
                        pair_codes = np.uint32(first_codes[lane] & mask) | np.uint32(
                            second_codes[lane] & mask
                        ) << np.uint32(16)
                        to[lane] |= pair_codes << by
                    if high_bits > 0:
                        to = words[group * size + PANEL * (pairs // per_low + pair // per_high) :]
                        by = high_bits * np.uint32(pair % per_high)
                        for lane in range(PANEL):
                            pair_codes = np.uint32(first_codes[lane] >> 4) | np.uint32(
                                second_codes[lane] >> 4
                            ) << np.uint32(16)
                            to[lane] |= pair_codes << by


def code_table(parts: Sequence[CodedRows]) -> Tensor:
    """int64 [2 · panels]: of each panel of `parts`, one after another, its address and its kind's number.

    Lays out those of the parts that are not `packed` yet. The addresses hold as long as the parts do.
    """
    tables = []
    for part in parts:
        if part.packed is None:
            part.packed = code_panels(part.kind, part.raw)
        addresses = part.packed.data_ptr() + part.packed[0].nbytes * torch.arange(len(part.packed))
        tables.append(torch.stack([addresses, torch.full_like(addresses, NUMBERS[part.kind])], 1))
    return torch.cat(tables).flatten()


def code_panels(name: str, raw: Tensor) -> Tensor:
    """Stored rows, uint8 [outputs, bytes], as panels uint8 [outputs / PANEL, blocks, `PanelBlock.size`]."""
    kind, number, block = KINDS[name], NUMBERS[name], PanelBlock(KINDS[name])
    blocks = raw.view(len(raw), -1, kind.stored)
    panels = torch.empty(len(raw) // PANEL, blocks.shape[1], block.size, dtype=torch.uint8)
    stored, out = blocks.numpy(), panels.numpy()

    def fill(begin: int, end: int) -> None:
        _fill_panels(number, kind, block.header, stored[begin * PANEL : end * PANEL], out[begin:end])

    in_threads(fill, len(panels))
    return panels
