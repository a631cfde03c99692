# mypy: allow-untyped-defs
"""A linear layer as compiled products read it, and what becomes of a sum of its products."""

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from inference.engines.cpu.vectors import LANES, LONG, added, arrays_of, loaded, row_of, stored

PANEL = LANES  # outputs whose weights lie together, those of one input after those of another
PARTS = 3  # bfloat16s whose sum is a float32


class Linear(NamedTuple):
    """A linear layer: weights [outputs / PANEL, inputs, PANEL], panels, in one axis; scales, biases float32 [outputs].

    Weights are float32, the bits of bfloat16 (uint16) or of float16 (int16), or int8 codes. Or they are pairs of
    bfloat16s (uint32), those of two inputs, the first one in the lower bits: [outputs / PANEL, inputs / 2, PANEL]. Two
    such pairs of neighbouring outputs (uint64) lie the same way and are for AMX. What is multiplied as bfloat16s, by
    pairs or by AMX, counts for zero where it is below the normal floats.
    """

    weights: np.ndarray
    inputs: int
    scales: np.ndarray
    biases: np.ndarray


def weights_in(weights):
    """How many weights a number of a `Linear`'s holds. In compiled code: see `_weights_of`."""


@overload(weights_in)
def _weights_of(weights):
    count = {types.uint32: 2, types.uint64: 4}.get(weights.dtype, 1)
    return lambda weights: count


class Outputs(NamedTuple):
    """What becomes of sums, in LLVM's terms: scales, biases and out, the outputs, of a numba type, `halves` or not."""

    scales: object
    biases: object
    out: object
    kind: object
    halves: object

    @classmethod
    def of(cls, context, builder, kinds, given, halves):
        """Of arguments of an intrinsic: the arrays of these kinds."""
        arrays = dict(zip(kinds, arrays_of(context, builder, kinds.values(), given), strict=True))
        return cls(**arrays, kind=kinds["out"].dtype, halves=halves)

    def scaled(self, builder, column):
        """(biases, scales) of the panel that begins at output `column`."""
        return tuple(loaded(builder, array.data, column, types.float32) for array in (self.biases, self.scales))

    def put(self, builder, total, scaled, row, column):
        """Scale a vector of sums, add biases, and put it into a row of the outputs."""
        value = added(builder, scaled[0], total, scaled[1])
        stored(builder, value, row_of(builder, self.out, row), column, self.kind, self.halves)


def distances_ahead(builder, size, panels, turn, turns):
    """How far before each of some panels of `size` the next ones lie, where this turn has memory bring those; else 0.

    So the next panels come while these are computed with, in the turns of all blocks of rows.
    """
    turn_of = [builder.sdiv(builder.mul(turns, LONG(place)), LONG(panels)) for place in range(panels)]
    own = [builder.icmp_signed("==", one, turn) for one in turn_of]
    return [builder.select(one, builder.mul(size, LONG(panels)), LONG(0)) for one in own]


def switch_between(builder, cases, number, add):
    """add(case) for the one of `cases`, numbers, that `number` is."""
    after = builder.append_basic_block("after")
    choice = builder.switch(number, after)
    for case in cases:
        block = builder.append_basic_block("case")
        choice.add_case(LONG(case), block)
        builder.position_at_end(block)
        add(case)
        builder.branch(after)
    builder.position_at_end(after)
