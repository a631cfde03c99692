# mypy: allow-untyped-defs
"""Stored rows of quantised weights laid out in panels, as `by_codes` reads them."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.draft_models.formats.gguf_codes import (
    CODE_KINDS,
    KIND_NUMBERS,
    LONGEST,
    MOST_GROUPS,
    CodedRows,
    compile_uncounted,
    in_threads,
    unpack,
)
from outrider.inference.engines.cpu.by_codes import PanelBlock
from outrider.inference.engines.cpu.large_pages import in_large_pages
from outrider.inference.engines.cpu.vectors import PANEL


@compile_uncounted
def _pack_lines(first, second, shift, bits, by, lines):
    """Add to numbers `lines`, above `by` bits, 1, 2 or 4 `bits` of eight codes each, those from bit `shift` on.

    The codes are the bytes of a number of `first` and one of `second`. Those at even places are side by side, the first
    in the lowest bits, and above 16 bits those at odd places.
    """
    mask, two = ((1 << bits) - 1) * 0x01010101, (1 << (2 * bits)) - 1
    for index in range(len(lines)):
        low, high = (first[index] >> shift) & mask, (second[index] >> shift) & mask
        low, high = low | low >> (16 - bits), high | high >> (16 - bits)
        even, odd = (low & two) | (high & two) << (2 * bits), (low >> 8 & two) | (high >> 8 & two) << (2 * bits)
        lines[index] |= np.uint32((even | odd << 16) << by)


@compile_uncounted
def _fill_panels(kind_number, code_kind, header, raw, panels, codes, turned, scales, minima):
    """Lay out rows of blocks [16 · panels, blocks, bytes] as panels [panels, blocks, bytes of a panel's block].

    A line is 32 bits of each output. Loops over lines are long, so that they are compiled to vectors. The last four are
    for use here: uint8 [16, inputs], uint32 [2, inputs / 8 · 16], uint8 [groups] each.
    """
    fours = codes.view(np.uint32)
    high_bits, inputs = code_kind.bits - 4, code_kind.group_size * code_kind.groups
    count = code_kind.group_size // 8 * PANEL  # numbers of a group's lower bits
    for panel in range(panels.shape[0]):
        for block in range(raw.shape[1]):
            out = panels[panel, block]
            out[:] = 0
            for lane in range(PANEL):
                stored = raw[panel * PANEL + lane, block]
                first, second = unpack(kind_number, stored, codes[lane], scales, minima)
                out[2 * lane], out[2 * lane + 1] = stored[first], stored[first + 1]
                after = 2 * PANEL
                if second >= 0:
                    out[after + 2 * lane], out[after + 2 * lane + 1] = stored[second], stored[second + 1]
                    after += 2 * PANEL
                for group in range(code_kind.groups):
                    if code_kind.groups > 1:
                        out[after + group * PANEL + lane] = scales[group]
                        if second >= 0:
                            out[after + (code_kind.groups + group) * PANEL + lane] = minima[group]
                for pair in range(inputs // 8):  # lines of four codes: the even ones, the odd ones
                    turned[0, pair * PANEL + lane] = fours[lane, 2 * pair]
                    turned[1, pair * PANEL + lane] = fours[lane, 2 * pair + 1]
            numbers = out[header:].view(np.uint32)
            if code_kind.bits == 4:
                _pack_lines(turned[0], turned[1], 0, 4, 0, numbers)
                continue
            for group in range(code_kind.groups):
                even, odd = turned[0, group * count :], turned[1, group * count :]
                to = numbers[group * count * code_kind.bits // 4 :]
                if code_kind.bits == 8:
                    for line in range(code_kind.group_size // 4):
                        of_line = (odd if line % 2 else even)[line // 2 * PANEL :]
                        for lane in range(PANEL):
                            four = of_line[lane]
                            swapped = (four & 0xFF0000FF) | (four >> 8 & 0xFF00) | ((four & 0xFF00) << 8)
                            to[line * PANEL + lane] = swapped
                    continue
                _pack_lines(even, odd, 0, 4, 0, to[:count])
                for line in range(code_kind.group_size // 8):
                    per_line = 4 // high_bits  # numbers of four pairs' upper bits
                    begin = count + line // per_line * PANEL
                    _pack_lines(
                        even[line * PANEL :], odd[line * PANEL :], 4, high_bits, 4 * high_bits * (line % per_line),
                        to[begin : begin + PANEL],
                    )  # fmt: skip


def code_table(parts: Sequence[CodedRows], function_of: Callable[[int], int]) -> Tensor:
    """int64 [2 · panels]: for each panel of `parts`, its address and the address of the function that multiplies it.

    function_of: the function's address for the number of a kind. Parts that are not `packed` yet are laid out first.
    The panels' addresses hold as long as the parts exist.
    """
    tables = []
    for part in parts:
        if part.packed is None:
            part.packed = code_panels(part.kind_name, part.raw)
            part.release_pages()
        addresses = part.packed.data_ptr() + part.packed[0].nbytes * torch.arange(len(part.packed))
        function = function_of(KIND_NUMBERS[part.kind_name])
        tables.append(torch.stack([addresses, torch.full_like(addresses, function)], 1))
    return torch.cat(tables).flatten()


def code_panels(name: str, raw: Tensor) -> Tensor:
    """Stored rows, uint8 [outputs, bytes], as panels uint8 [outputs / PANEL, blocks, `PanelBlock.size`]."""
    code_kind, kind_number, block = CODE_KINDS[name], KIND_NUMBERS[name], PanelBlock(CODE_KINDS[name])
    blocks = raw.view(len(raw), -1, code_kind.block_bytes)
    panels = in_large_pages(torch.empty(len(raw) // PANEL, blocks.shape[1], block.size, dtype=torch.uint8))
    stored, out = blocks.numpy(), panels.numpy()

    def fill(begin: int, end: int) -> None:
        codes, turned = np.empty((PANEL, LONGEST), np.uint8), np.empty((2, LONGEST // 8 * PANEL), np.uint32)
        scales, minima = np.empty((2, MOST_GROUPS), np.uint8)
        rows = stored[begin * PANEL : end * PANEL]
        _fill_panels(kind_number, code_kind, block.header, rows, out[begin:end], codes, turned, scales, minima)

    in_threads(fill, len(panels), PANEL * blocks.shape[1] * code_kind.inputs)
    return panels
