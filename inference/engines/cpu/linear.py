# mypy: allow-untyped-defs
"""A linear layer as compiled products read it, and the conversion of sums to its outputs."""

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from outrider.inference.engines.cpu.vectors import LANES, LONG, added, arrays_of, loaded, row_of, stored

PANEL = LANES  # outputs whose weights are stored together, input by input
PARTS = 3  # bfloat16s whose sum is a float32


class Linear(NamedTuple):
    """A linear layer: weights, panels [outputs / PANEL, inputs, PANEL], flattened; scales, biases float32 [outputs].

    Weights are float32, the bits of bfloat16 (uint16) or of float16 (int16), or int8 codes. Or they are pairs of
    bfloat16s (uint32), those of two inputs, the first one in the lower bits: [outputs / PANEL, inputs / 2, PANEL]. Two
    such pairs of neighbouring outputs (uint64) have the same layout and are for AMX. Products of bfloat16s, by pairs or
    by AMX, treat subnormal numbers as zero.
    """

    weights: np.ndarray
    inputs: int
    scales: np.ndarray
    biases: np.ndarray


def weights_in(weights):
    """The number of weights per stored number of a `Linear`. In compiled code: see `_weights_of`."""


@overload(weights_in)
def _weights_of(weights):
    count = {types.uint32: 2, types.uint64: 4}.get(weights.dtype, 1)
    return lambda weights: count


class Outputs(NamedTuple):
    """LLVM values to turn sums into outputs: scales, biases, and `out` of numba type `kind`, rounded if `halves`."""

    scales: object
    biases: object
    out: object
    kind: object
    halves: object

    @classmethod
    def of(cls, context, builder, kinds, given, halves):
        """From arguments of an intrinsic, which are arrays of these kinds."""
        arrays = dict(zip(kinds, arrays_of(context, builder, kinds.values(), given), strict=True))
        return cls(**arrays, kind=kinds["out"].dtype, halves=halves)

    def scaled(self, builder, column):
        """(biases, scales) of the panel that begins at output `column`."""
        return tuple(loaded(builder, array.data, column, types.float32) for array in (self.biases, self.scales))

    def put(self, builder, total, scaled, row, column):
        """Scale a vector of sums, add biases, and store it in a row of the outputs."""
        value = added(builder, scaled[0], total, scaled[1])
        stored(builder, value, row_of(builder, self.out, row), column, self.kind, self.halves)


def distances_ahead(builder, size, panels, turn, turns):
    """The distances from some panels of `size` to the next ones that this turn prefetches; 0 for those of other turns.

    So the next panels are fetched while these are used, spread over the turns of all blocks of rows.
    """
    turn_of = [builder.sdiv(builder.mul(turns, LONG(place)), LONG(panels)) for place in range(panels)]
    own = [builder.icmp_signed("==", one, turn) for one in turn_of]
    return [builder.select(one, builder.mul(size, LONG(panels)), LONG(0)) for one in own]


def switch_between(builder, cases, number, add):
    """Emit a switch that runs add(case) for the one of `cases` that equals `number`."""
    after = builder.append_basic_block("after")
    choice = builder.switch(number, after)
    for case in cases:
        block = builder.append_basic_block("case")
        choice.add_case(LONG(case), block)
        builder.position_at_end(block)
        add(case)
        builder.branch(after)
    builder.position_at_end(after)
