# mypy: allow-untyped-defs
"""Stored rows of quantised weights laid out in panels, as `by_codes` reads them.

A panel has the weights of `PANEL` outputs. A row is stored as blocks of inputs, a block as groups with a scale (and a
minimum) each. A kind says how many bits a code has, and how many inputs a block and a group. A lane is an output.
A line is a uint32 for each lane: eight codes of 4 bits, four of 8 bits, or upper bits of some eights. `PanelBlock` has
the layout: a block's factors, the scales and minima of its groups and, from byte `header` on, the lines.
"""

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
    compile_uncounted,  # by numba, without counting references to slices
    in_threads,
    unpack,
)
from outrider.inference.engines.cpu.large_pages import in_large_pages
from outrider.inference.engines.cpu.panel_block import PanelBlock
from outrider.inference.engines.cpu.vectors import PANEL


@compile_uncounted
def _pack_lines(first, second, shift, bits, by, lines):
    """Write 1, 2 or 4 `bits` of eight codes, from a code's bit `shift` on, into each number of `lines` from bit `by`.

    A number of `first` has codes 0 to 3 as bytes, one of `second` codes 4 to 7. Even codes go to the lower 16 bits, odd
    ones to the upper 16. Example: first 0x03020100, second 0x07060504, bits 4, shift 0 and by 0 give 0x7531_6420.
    """
    mask, mask2 = ((1 << bits) - 1) * 0x01010101, (1 << (2 * bits)) - 1
    for index in range(len(lines)):
        low, high = (first[index] >> shift) & mask, (second[index] >> shift) & mask
        low, high = low | low >> (16 - bits), high | high >> (16 - bits)  # codes 0, 2 and 1, 3 side by side
        even, odd = (low & mask2) | (high & mask2) << (2 * bits), (low >> 8 & mask2) | (high >> 8 & mask2) << (2 * bits)
        lines[index] |= np.uint32((even | odd << 16) << by)


@compile_uncounted
def _pack_group(code_kind, first_fours, second_fours, lines):
    """Write a group's codes: those of 8 bits in lines of four, in the order of `panel_block.four_codes`, else the
    lower 4 bits and then the upper bits."""
    if code_kind.bits == 8:
        for line in range(code_kind.group_size // 4):
            begin, bit_shift = line // 2 * PANEL, 16 * (line % 2)
            for lane in range(PANEL):  # 0x03020100 and 0x07060504 become 0x0501_0400 and 0x0703_0602
                first, second = first_fours[begin + lane] >> bit_shift, second_fours[begin + lane] >> bit_shift
                low = (first & 0xFF) | (second & 0xFF) << 8
                lines[line * PANEL + lane] = low | (first & 0xFF00) << 8 | (second & 0xFF00) << 16
        return
    high_bits, low_words = code_kind.bits - 4, code_kind.group_size // 8 * PANEL  # low_words: numbers of the lower bits
    _pack_lines(first_fours, second_fours, 0, 4, 0, lines[:low_words])
    eights_per_line = 4 // high_bits  # eights of codes whose upper bits share a line
    for eight in range(code_kind.group_size // 8):
        begin, bit_shift = low_words + eight // eights_per_line * PANEL, 4 * high_bits * (eight % eights_per_line)
        firsts, seconds = first_fours[eight * PANEL :], second_fours[eight * PANEL :]
        _pack_lines(firsts, seconds, 4, high_bits, bit_shift, lines[begin : begin + PANEL])


@compile_uncounted
def _fill_panels(kind_number, code_kind, header, raw, panels, codes, turned, scales, minima):
    """Lay out rows of blocks [16 · panels, blocks, bytes] as panels [panels, blocks, `PanelBlock.size`].

    Loops over lines are long, so that they are compiled to vectors. The last four arguments are workspaces: codes uint8
    [16, inputs]; turned uint32 [2, inputs / 8 · 16], the first and the second four of every eight codes of each output;
    scales and minima uint8 [groups]. header: bytes of a block before its codes.
    """
    fours, inputs = codes.view(np.uint32), code_kind.group_size * code_kind.block_groups
    group_fours = code_kind.group_size // 8 * PANEL  # numbers of each half of `turned` for a group
    for panel in range(panels.shape[0]):
        for block in range(raw.shape[1]):
            out = panels[panel, block]
            out[:] = 0
            for lane in range(PANEL):
                stored_block = raw[panel * PANEL + lane, block]
                scale_at, minimum_at = unpack(kind_number, stored_block, codes[lane], scales, minima)
                out[2 * lane], out[2 * lane + 1] = stored_block[scale_at], stored_block[scale_at + 1]
                after_factors = 2 * PANEL
                if minimum_at >= 0:  # −1: the kind has no minima
                    begin, after_factors = 2 * PANEL + 2 * lane, 4 * PANEL
                    out[begin], out[begin + 1] = stored_block[minimum_at], stored_block[minimum_at + 1]
                if code_kind.block_groups > 1:
                    for group in range(code_kind.block_groups):
                        out[after_factors + group * PANEL + lane] = scales[group]
                        if minimum_at >= 0:
                            out[after_factors + (code_kind.block_groups + group) * PANEL + lane] = minima[group]
                for eight in range(inputs // 8):
                    turned[0, eight * PANEL + lane] = fours[lane, 2 * eight]
                    turned[1, eight * PANEL + lane] = fours[lane, 2 * eight + 1]
            lines = out[header:].view(np.uint32)
            if code_kind.bits == 4:  # without upper bits the lines of all groups are one range
                _pack_lines(turned[0], turned[1], 0, 4, 0, lines)
                continue
            for group in range(code_kind.block_groups):
                first_fours, second_fours = turned[0, group * group_fours :], turned[1, group * group_fours :]
                _pack_group(code_kind, first_fours, second_fours, lines[group * group_fours * code_kind.bits // 4 :])


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
        function_address = function_of(KIND_NUMBERS[part.kind_name])
        tables.append(torch.stack([addresses, torch.full_like(addresses, function_address)], 1))
    return torch.cat(tables).flatten()


def code_panels(kind_name: str, raw: Tensor) -> Tensor:
    """Stored rows, uint8 [outputs, bytes], as panels uint8 [outputs / PANEL, blocks, `PanelBlock.size`]."""
    code_kind, kind_number, block = CODE_KINDS[kind_name], KIND_NUMBERS[kind_name], PanelBlock(CODE_KINDS[kind_name])
    blocks = raw.view(len(raw), -1, code_kind.block_bytes)
    panels = in_large_pages(torch.empty(len(raw) // PANEL, blocks.shape[1], block.size, dtype=torch.uint8))
    stored_blocks, out = blocks.numpy(), panels.numpy()

    def fill(begin: int, end: int) -> None:
        codes, transposed = np.empty((PANEL, LONGEST), np.uint8), np.empty((2, LONGEST // 8 * PANEL), np.uint32)
        scales, minima = np.empty((2, MOST_GROUPS), np.uint8)
        rows = stored_blocks[begin * PANEL : end * PANEL]
        _fill_panels(kind_number, code_kind, block.header, rows, out[begin:end], codes, transposed, scales, minima)

    in_threads(fill, len(panels), PANEL * blocks.shape[1] * code_kind.inputs)
    return panels
