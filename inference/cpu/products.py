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
    both_of,
    every,
    loaded,
    loop,
    place_in,
    row_of,
    stored,
)

PANEL = LANES  # outputs whose weights lie together, those of one input after those of another
DOTS = bool(FEATURES.get("avx512bf16"))  # an instruction for the sum of two products of bfloat16s, see `Linear`
_WIDE = bool(FEATURES.get("avx512f"))  # a register holds `LANES` floats, and there are 32
_SUMS = 16 if _WIDE else 4  # vectors of sums that a tile of few rows is widened to, by more panels
_MOST = 4  # panels that are read at once
TILE = 8 if _WIDE else 6  # rows whose sums over a panel fit the processor's registers


@kernel
def _panels_of(rows):
    """How many panels are read at once where tiles have so many rows at most."""
    return max(1, min(_MOST, _SUMS // rows))


# (rows, panels) of a tile. Where a pass has several, they have all as many rows, or one fewer.
_TILES = sorted(
    {(rows, _panels_of.py_func(rows)) for rows in range(1, TILE + 1)}
    | {(rows - 1, _panels_of.py_func(rows)) for rows in range(TILE // 2 + 1, TILE + 1)}
    | {(1, 1)}
)


class Linear(NamedTuple):
    """A linear layer: weights [outputs / PANEL, inputs, PANEL], panels, in one axis; scales, biases float32 [outputs].

    Weights are float32, the bits of bfloat16 (uint16) or of float16 (int16), or int8 codes. Or they are pairs of
    bfloat16s (uint32), those of two inputs, the first one in the lower bits: [outputs / PANEL, inputs / 2, PANEL].
    Pairs take half the steps to widen. By an `x` of bfloat16s (uint16) they are multiplied as they are, where there are
    `DOTS`. What is below the normal floats counts for zero then.
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


class _Sides(NamedTuple):
    """What a tile is made of, in LLVM's terms: arrays, their numba types, and where it stands in them."""

    arrays: dict
    kinds: dict
    depth: object
    row: object
    panel: object
    turn: object
    turns: object
    halves: object


def _add_tile(builder, sides, rows, panels):
    """The code for some rows of `product` and the outputs of some panels.

    Each panel is read once, in order, each number is widened once, and every sum stays in a register. A sum's terms are
    added in the order of inputs. So it does not depend on other rows, and not on other panels.
    """
    weights, x = sides.kinds["weights"], sides.kinds["x"]
    widens = weights == types.uint32 and x == types.float32
    number = FLOAT if x == types.float32 else INT  # of x: a pair of bfloat16s is as wide as a float
    numbers = [builder.add(sides.row, LONG(place)) for place in range(rows)]
    sources = [row_of(builder, sides.arrays["x"], one) for one in numbers]
    size = builder.mul(sides.depth, LONG(LANES))
    first = builder.mul(builder.sdiv(sides.panel, LONG(LANES)), size)
    offsets = [builder.add(first, builder.mul(size, LONG(place))) for place in range(panels)]
    starts = [builder.gep(sides.arrays["weights"].data, [offset]) for offset in offsets]
    # The next panels come while these are computed with, in the turns of all tiles: one of them is asked for in each.
    turn_of = [builder.sdiv(builder.mul(sides.turns, LONG(place)), LONG(panels)) for place in range(panels)]
    own = [builder.icmp_signed("==", turn, sides.turn) for turn in turn_of]
    ahead = [builder.select(one, builder.mul(size, LONG(panels)), LONG(0)) for one in own]

    def multiply(k, sums):
        at = builder.mul(k, LONG(LANES))
        for start, distance in zip(starts, ahead, strict=True):
            ask_for(builder, builder.gep(start, [builder.add(at, distance)]))
        vectors = [loaded(builder, start, at, weights) for start in starts]
        steps = zip(*(both_of(builder, pairs) for pairs in vectors), strict=True) if widens else [vectors]
        for step, of_panels in enumerate(steps):
            input_ = builder.add(builder.mul(k, LONG(2)), LONG(step)) if widens else k
            each = [every(builder, builder.load(place_in(builder, one, input_, number), align=4)) for one in sources]
            terms = [(one, vector) for one in each for vector in of_panels]
            sums = [added(builder, total, vector, one) for total, (one, vector) in zip(sums, terms, strict=True)]
        return sums

    sums = loop(builder, sides.depth, [ZEROS] * (rows * panels), multiply)
    columns = [builder.add(sides.panel, LONG(place * LANES)) for place in range(panels)]
    scaled = [
        tuple(loaded(builder, sides.arrays[name].data, column, types.float32) for name in ("biases", "scales"))
        for column in columns
    ]
    for place, total in enumerate(sums):
        row, column = divmod(place, panels)
        value = added(builder, scaled[column][0], total, scaled[column][1])
        line = row_of(builder, sides.arrays["out"], numbers[row])
        stored(builder, value, line, columns[column], sides.kinds["out"], sides.halves)


@intrinsic
def _multiply_tile(context, weights, scales, biases, x, out, depth, row, rows, panel, panels, turn, turns, halves):
    """One of `_TILES`: rows from `row` on and the outputs of panels from output `panel` on; see `product`."""
    kinds = {"weights": weights, "scales": scales, "biases": biases, "x": x, "out": out}

    def make(context, builder, signature, given):
        arrays = {
            name: context.make_array(kind)(context, builder, one)
            for (name, kind), one in zip(kinds.items(), given[:5], strict=True)
        }
        depth, row, rows, panel, panels, turn, turns, halves = given[5:]
        of = {name: kind.dtype for name, kind in kinds.items()}
        sides = _Sides(arrays, of, depth, row, panel, turn, turns, halves)
        after = builder.append_basic_block("after")
        choice = builder.switch(builder.add(builder.mul(rows, LONG(_MOST + 1)), panels), after)
        for size in _TILES:
            block = builder.append_basic_block("tile")
            choice.add_case(LONG(size[0] * (_MOST + 1) + size[1]), block)
            builder.position_at_end(block)
            _add_tile(builder, sides, *size)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(weights, scales, biases, x, out, *[types.int64] * 7, types.boolean), make


@kernel
def product(linear, x, rows, first, last, halves, out):
    """out[r, c] of outputs first … last − 1: their scale · (x[r] · weights of c) + their bias.

    x [R, inputs]: float32, or bfloat16 where the weights are pairs. first and last are multiples of `PANEL`. halves:
    round to bfloat16.
    """
    weights, inputs, scales, biases = linear
    depth = inputs // inputs_in(weights)
    turns = -(-rows // TILE)
    panels = _panels_of(-(-rows // turns))
    if last - first < panels * PANEL:  # next to no outputs: by the smallest tile
        turns, panels = rows, 1
    for group in range(first, last, panels * PANEL):
        panel = min(group, last - panels * PANEL)  # the last panels may be computed twice
        row = 0
        for turn in range(turns):
            some = (rows - row + turns - turn - 1) // (turns - turn)  # as many in each, nearly
            _multiply_tile(weights, scales, biases, x, out, depth, row, some, panel, panels, turn, turns, halves)
            row += some


@kernel
def part(outputs, rank, threads):
    """First and last output of a thread, in whole panels."""
    panels = outputs // PANEL
    return panels * rank // threads * PANEL, panels * (rank + 1) // threads * PANEL
