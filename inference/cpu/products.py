# mypy: allow-untyped-defs
"""Products of few rows and a large weight: each weight is read once, in order."""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from inference.cpu.numbers import kernel, rounded, store

PANEL = 16  # outputs whose weights lie together, those of one input after those of another
TILE = 6  # rows whose sums over a panel fit a processor's registers


def _tile_of(rows):
    """A function (x [R, d], row, weights, begin, depth, tile): tile[i, j] = Σ_k x[row + i, k] · panel[k, j], i < rows.

    The panel, weights[begin:], has depth × `PANEL` numbers. It is read once, in order, each number is widened once, and
    every sum stays in a register. A sum's terms are added in the order of k. So it does not depend on other rows.
    """

    @intrinsic
    def tile_of(context, x, row, weights, begin, depth, tile):
        def make(context, builder, signature, given):
            of_x, of_weights, of_tile = (
                context.make_array(kind)(context, builder, given[place])
                for place, kind in ((0, x), (2, weights), (5, tile))
            )
            place, wide, byte = ir.IntType(64), ir.VectorType(ir.FloatType(), PANEL), ir.IntType(8).as_pointer()
            first_of_all = ir.Constant(ir.VectorType(ir.IntType(32), PANEL), [0] * PANEL)
            line = cgutils.unpack_tuple(builder, of_x.strides, 2)[0]

            def row_of(number):
                start = builder.mul(builder.add(given[1], place(number)), line)
                moved = builder.gep(builder.bitcast(of_x.data, byte), [start])
                return builder.bitcast(moved, ir.FloatType().as_pointer())

            sources = [row_of(number) for number in range(rows)]
            panel = builder.gep(of_weights.data, [given[3]])
            before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(place)
            k.add_incoming(place(0), before)
            sums = [builder.phi(wide) for _ in range(rows)]
            vector = _widened(builder, panel, builder.mul(k, place(PANEL)), weights.dtype)
            for total, source in zip(sums, sources, strict=True):
                one = builder.load(builder.gep(source, [k]), align=4)
                lane = builder.insert_element(ir.Constant(wide, ir.Undefined), one, ir.IntType(32)(0))
                every = builder.shuffle_vector(lane, lane, first_of_all)
                term = builder.fmul(every, vector, flags=("contract",))
                total.add_incoming(ir.Constant(wide, [0.0] * PANEL), before)
                total.add_incoming(builder.fadd(total, term, flags=("contract",)), loop)
            following = builder.add(k, place(1))
            k.add_incoming(following, loop)
            builder.cbranch(builder.icmp_signed("<", following, given[4]), loop, after)
            builder.position_at_end(after)
            into = builder.bitcast(of_tile.data, wide.as_pointer())
            for number, total in enumerate(sums):
                builder.store(total.incomings[1][0], builder.gep(into, [place(number)]), align=4)
            return context.get_dummy_value()

        return types.void(x, types.int64, weights, types.int64, types.int64, tile), make

    return tile_of


def _widened(builder, panel, at, kind):
    """`PANEL` stored numbers as a vector of floats."""
    wide = ir.VectorType(ir.FloatType(), PANEL)
    whole = ir.VectorType(ir.IntType(32), PANEL)
    start = builder.gep(panel, [at])
    if kind == types.float32:
        return builder.load(builder.bitcast(start, wide.as_pointer()), align=4)
    bits = 8 if kind == types.int8 else 16
    stored = builder.load(builder.bitcast(start, ir.VectorType(ir.IntType(bits), PANEL).as_pointer()), align=bits // 8)
    if kind == types.int8:
        return builder.sitofp(builder.sext(stored, whole), wide)
    if kind == types.int16:
        return builder.fpext(builder.bitcast(stored, ir.VectorType(ir.HalfType(), PANEL)), wide)
    return builder.bitcast(builder.shl(builder.zext(stored, whole), ir.Constant(whole, [16] * PANEL)), wide)


_tile_of_1, _tile_of_2, _tile_of_3 = _tile_of(1), _tile_of(2), _tile_of(3)
_tile_of_4, _tile_of_5, _tile_of_6 = _tile_of(4), _tile_of(5), _tile_of(6)


class Linear(NamedTuple):
    """A linear layer: weights [outputs / PANEL, inputs, PANEL], panels, in one axis; scales, biases float32 [outputs].

    Weights are float32, the bits of bfloat16 (uint16) or of float16 (int16), or int8 codes.
    """

    weights: np.ndarray
    inputs: int
    scales: np.ndarray
    biases: np.ndarray


@kernel
def product(linear, x, rows, first, last, halves, tile, out):
    """out[r, c] of outputs first … last − 1: their scale · (x[r] · weights of c) + their bias.

    first and last are multiples of `PANEL`. halves: round to bfloat16. tile float32 [TILE, PANEL]: room to work in.
    """
    weights, inputs, scales, biases = linear
    for panel in range(first, last, PANEL):
        begin = panel * inputs
        row = 0
        while row < rows:
            some = -(-(rows - row) // -(-(rows - row) // TILE))  # tiles of one size, nearly
            if some == 1:
                _tile_of_1(x, row, weights, begin, inputs, tile)
            elif some == 2:
                _tile_of_2(x, row, weights, begin, inputs, tile)
            elif some == 3:
                _tile_of_3(x, row, weights, begin, inputs, tile)
            elif some == 4:
                _tile_of_4(x, row, weights, begin, inputs, tile)
            elif some == 5:
                _tile_of_5(x, row, weights, begin, inputs, tile)
            else:
                _tile_of_6(x, row, weights, begin, inputs, tile)
            for i in range(some):
                target = out[row + i]
                for j in range(PANEL):
                    store(target, panel + j, rounded(tile[i, j] * scales[panel + j] + biases[panel + j], halves))
            row += some


@kernel
def part(outputs, rank, threads):
    """First and last output of a thread, in whole panels."""
    panels = outputs // PANEL
    return panels * rank // threads * PANEL, panels * (rank + 1) // threads * PANEL
