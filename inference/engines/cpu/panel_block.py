# mypy: allow-untyped-defs
"""Where a panel of quantised weights has its scales and its codes, and LLVM vectors of them for each output.

A panel has the weights of `PANEL` (16) outputs. A weight is scale · (code − offset) − minimum. Scale and minimum belong
to a group of inputs, and some groups are a block, which begins with its float16 factors (see `CodeKind`). `code_panels`
writes panels, `by_codes` reads them. The functions emit instructions by `builder`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llvmlite import ir

from outrider.inference.engines.cpu.vectors import BYTE, FLOATS, INT, INTS, LANES, LONG, PANEL, splat_int

if TYPE_CHECKING:
    from outrider.draft_models.formats.gguf_codes import CodeKind

WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)  # a line
LINE = 64  # bytes of a line: an integer of 16 bits for each of two inputs of 16 outputs


@dataclass(frozen=True)
class PanelBlock:
    """The layout of a block of a panel, for `PANEL` outputs. The rows in brackets exist only if the kind has them.

        2 bytes of each output              the factors of scales, float16
        [2 bytes of each output             the factors of minima]
        [groups × 1 byte of each output     the groups' scales]
        [groups × 1 byte of each output     the groups' minima]
        from byte `header` on               the codes, group by group

    A group's codes are lines of the lower 4 bits (of 8-bit codes all bits), then lines of the upper bits. A line is 32
    words of 16 bits, two for each output: the first has codes of even inputs, the second codes of the odd inputs after
    them, from the lowest bits on. Codes 0 to 7 of an output are the words 0x6420 and 0x7531 if they have 4 bits. With 8
    bits they are 0x0400 and 0x0501 in one line, 0x0602 and 0x0703 in the next.
    """

    code_kind: "CodeKind"

    @property
    def header(self) -> int:
        """Bytes before the codes."""
        numbers_per_group = 1 + self.code_kind.has_minimum
        if self.code_kind.block_groups == 1:  # the factors are the group's scale and minimum
            return 2 * PANEL * numbers_per_group
        return -(-PANEL * numbers_per_group * (2 + self.code_kind.block_groups) // LINE) * LINE  # whole lines

    @property
    def group_bytes(self) -> int:
        """Bytes of a group's codes."""
        return PANEL * self.code_kind.group_size * self.code_kind.bits // 8

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return self.header + self.code_kind.block_groups * self.group_bytes


def load_vector(builder, address, offset, vector_type):
    """A vector, `offset` bytes after an address."""
    start = builder.gep(builder.bitcast(address, BYTE.as_pointer()), [offset])
    return builder.load(builder.bitcast(start, vector_type.as_pointer()), align=1)


def _splat_word(number):
    return ir.Constant(WORDS, [number] * 2 * LANES)


def in_all_words(builder, number):
    """An LLVM integer of 16 bits in all words of a line."""
    first = builder.insert_element(ir.Constant(WORDS, ir.Undefined), number, INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(INT, 2 * LANES), [0] * 2 * LANES))


def _shift_right(builder, words, bit_count):
    """Integers shifted right by a number of bits; left by a negative number."""
    if bit_count == 0:
        return words
    shift = builder.lshr if bit_count > 0 else builder.shl
    return shift(words, ir.Constant(words.type, [abs(bit_count)] * words.type.count))


def two_codes(builder, code_kind, lines, upper_words, pair_index):
    """The codes of the `pair_index`-th two of eight inputs, two vectors of floats. lines: of the lower 4 bits, or of 8;
    upper_words: the upper bits, those of these eight from bit 0 on; None for codes of 4 or 8 bits."""
    if code_kind.bits == 8:
        words = _shift_right(builder, lines[pair_index % 2], 8 * (pair_index // 2))
    else:
        words = _shift_right(builder, lines[0], 4 * pair_index)
    if upper_words is not None:
        upper_words = _shift_right(builder, upper_words, (code_kind.bits - 4) * pair_index - 4)  # to bits 4, 5, …
        upper_mask = _splat_word(2**code_kind.bits - 16)  # the bits above the lower 4
        words = builder.or_(builder.and_(words, _splat_word(15)), builder.and_(upper_words, upper_mask))
    words = builder.bitcast(words, INTS)
    halves = words, _shift_right(builder, words, 16)
    return [builder.sitofp(builder.and_(half, splat_int(2**code_kind.bits - 1)), FLOATS) for half in halves]


def four_codes(builder, code_kind, lines, upper_words, half_index):
    """The codes, a byte each, of inputs 0, 4, 1, 5 of eight (half_index 1: 2, 6, 3, 7). lines etc.: see `two_codes`."""
    if code_kind.bits == 8:
        return builder.bitcast(lines[half_index], INTS)
    codes = builder.and_(_shift_right(builder, lines[0], 4 * half_index), _splat_word(0x0F0F))
    if upper_words is not None:
        upper_bits = code_kind.bits - 4  # of each code; they go above the lower 4 bits of each byte of a word
        for target_bit, source_bit in ((4, upper_bits * half_index), (12, upper_bits * (2 + half_index))):
            shifted = _shift_right(builder, upper_words, source_bit - target_bit)
            codes = builder.or_(codes, builder.and_(shifted, _splat_word((2**upper_bits - 1) << target_bit)))
    return builder.bitcast(codes, INTS)


def scale_and_minimum(builder, code_kind, block_start, group):
    """(scale, minimum or None) of a group of a panel's block, for each output."""
    factors, begin = [], 2 * PANEL * (1 + code_kind.has_minimum)  # begin: the byte where the scales of groups begin
    for index in range(1 + code_kind.has_minimum):
        half = load_vector(builder, block_start, LONG(2 * PANEL * index), ir.VectorType(ir.HalfType(), LANES))
        factor = builder.fpext(half, FLOATS)
        if code_kind.block_groups > 1:
            offset = builder.add(LONG(begin + index * code_kind.block_groups * PANEL), builder.mul(group, LONG(PANEL)))
            scale_bytes = load_vector(builder, block_start, offset, ir.VectorType(BYTE, LANES))  # signed if no minimum
            widened = builder.zext(scale_bytes, INTS) if code_kind.has_minimum else builder.sext(scale_bytes, INTS)
            factor = builder.fmul(factor, builder.sitofp(widened, FLOATS))
        factors.append(factor)
    if code_kind.has_zero_point:  # the second factor is a zero point: the minimum is scale · zero point
        factors[1] = builder.fmul(*factors)
    return factors[0], factors[1] if code_kind.has_minimum else None
