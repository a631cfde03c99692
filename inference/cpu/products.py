# mypy: allow-untyped-defs
"""Products of few rows and a large weight: each weight is read once, in order."""

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from inference.cpu.numbers import kernel
from inference.cpu.vectors import (
    FEATURES,
    FLOAT,
    INT,
    LANES,
    LONG,
    ZEROS,
    added,
    ask_for,
    every,
    loaded,
    loop,
    place_in,
    row_of,
    stored,
)

PANEL = LANES  # outputs whose weights lie together, those of one input after those of another
DOTS = bool(FEATURES.get("avx512bf16"))  # an instruction for the sum of two products of bfloat16s, see `Linear`
TILE = 8 if FEATURES.get("avx512f") else 6  # rows whose sums over a panel fit the processor's registers


def _tile_of(rows):
    """A function for some rows of `product` and the outputs of one panel.

    The panel is read once, in order, each number is widened once, and every sum stays in a register. A sum's terms are
    added in the order of inputs. So it does not depend on other rows.
    """

    @intrinsic
    def tile_of(context, weights, scales, biases, depth, x, row, panel, halves, out):
        def make(context, builder, signature, given):
            of_weights, of_scales, of_biases, of_x, of_out = (
                context.make_array(signature.args[place])(context, builder, given[place]) for place in (0, 1, 2, 4, 8)
            )
            depth, (row, panel, halves) = given[3], given[5:8]
            number = FLOAT if x.dtype == types.float32 else INT  # of x: a pair of bfloat16s is as wide as a float
            numbers = [builder.add(row, LONG(place)) for place in range(rows)]
            sources = [row_of(builder, of_x, one) for one in numbers]
            size = builder.mul(depth, LONG(LANES))
            start = builder.gep(of_weights.data, [builder.mul(builder.sdiv(panel, LONG(LANES)), size)])

            def multiply(k, sums):
                at = builder.mul(k, LONG(LANES))
                if rows > 2:  # the next panel comes while this one is computed with; with fewer rows no time is left
                    ask_for(builder, builder.gep(start, [builder.add(at, size)]))
                vector = loaded(builder, start, at, weights.dtype)
                each = [builder.load(place_in(builder, source, k, number), align=4) for source in sources]
                return [
                    added(builder, total, vector, every(builder, one)) for total, one in zip(sums, each, strict=True)
                ]

            sums = loop(builder, depth, [ZEROS] * rows, multiply)
            scale, bias = (loaded(builder, array.data, panel, types.float32) for array in (of_scales, of_biases))
            for one, total in zip(numbers, sums, strict=True):
                value = added(builder, bias, total, scale)
                stored(builder, value, row_of(builder, of_out, one), panel, out.dtype, halves)
            return context.get_dummy_value()

        whole = types.int64
        return types.void(weights, scales, biases, whole, x, whole, whole, types.boolean, out), make

    return tile_of


_tile_of_1, _tile_of_2, _tile_of_3, _tile_of_4 = _tile_of(1), _tile_of(2), _tile_of(3), _tile_of(4)
_tile_of_5, _tile_of_6, _tile_of_7, _tile_of_8 = _tile_of(5), _tile_of(6), _tile_of(7), _tile_of(8)


class Linear(NamedTuple):
    """A linear layer: weights [outputs / PANEL, inputs, PANEL], panels, in one axis; scales, biases float32 [outputs].

    Weights are float32, the bits of bfloat16 (uint16) or of float16 (int16), or int8 codes. Or they are pairs of
    bfloat16s (uint32), those of two inputs, the first one in the lower bits: [outputs / PANEL, inputs / 2, PANEL]. A
    processor that has `DOTS` multiplies such pairs as they are, twice as many at a time as floats. It takes what is
    below the normal floats for zero.
    """

    weights: np.ndarray
    inputs: int
    scales: np.ndarray
    biases: np.ndarray


def inputs_in(weights):
    """Of how many inputs a number of a `Linear`'s weights holds the weights. In compiled code: see `_inputs_of`."""


@overload(inputs_in)
def _inputs_of(weights):
    pairs = weights.dtype == types.uint32
    return (lambda weights: 2) if pairs else (lambda weights: 1)


@kernel
def product(linear, x, rows, first, last, halves, out):
    """out[r, c] of outputs first … last − 1: their scale · (x[r] · weights of c) + their bias.

    x [R, inputs]: float32, or bfloat16 where the weights are pairs. first and last are multiples of `PANEL`. halves:
    round to bfloat16.
    """
    weights, inputs, scales, biases = linear
    depth = inputs // inputs_in(weights)
    for panel in range(first, last, PANEL):
        row = 0
        while row < rows:
            some = -(-(rows - row) // -(-(rows - row) // TILE))  # tiles of one size, nearly
            if some == 1:
                _tile_of_1(weights, scales, biases, depth, x, row, panel, halves, out)
            elif some == 2:
                _tile_of_2(weights, scales, biases, depth, x, row, panel, halves, out)
            elif some == 3:
                _tile_of_3(weights, scales, biases, depth, x, row, panel, halves, out)
            elif some == 4:
                _tile_of_4(weights, scales, biases, depth, x, row, panel, halves, out)
            elif some == 5:
                _tile_of_5(weights, scales, biases, depth, x, row, panel, halves, out)
            elif some == 6:
                _tile_of_6(weights, scales, biases, depth, x, row, panel, halves, out)
            elif some == 7:
                _tile_of_7(weights, scales, biases, depth, x, row, panel, halves, out)
            else:
                _tile_of_8(weights, scales, biases, depth, x, row, panel, halves, out)
            row += some


@kernel
def part(outputs, rank, threads):
    """First and last output of a thread, in whole panels."""
    panels = outputs // PANEL
    return panels * rank // threads * PANEL, panels * (rank + 1) // threads * PANEL
