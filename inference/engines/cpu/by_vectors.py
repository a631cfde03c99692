# mypy: allow-untyped-defs
"""Products by vectors: rows of `x` in turns, a tile of sums in registers, each weight widened once per tile.

A panel has the weights of `PANEL` outputs, a tile is some rows by some panels. Functions of a `builder` emit LLVM code.
"""

from typing import NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.inference.engines.cpu.numbers import kernel
from outrider.inference.engines.cpu.vectors import (
    FEATURES,
    FLOAT,
    INT,
    LANES,
    LONG,
    PANEL,
    ZEROS,
    Outputs,
    Tile,
    add_product,
    address_at,
    arrays_of,
    distances_ahead,
    load_floats,
    loop,
    prefetch_line,
    row_of,
    splat,
    split_pairs,
    switch_between,
    weights_in,
)

DOTS = bool(FEATURES.get("avx512bf16"))  # an instruction for the sum of two products of bfloat16s, see `Linear`
_WIDE = bool(FEATURES.get("avx512f"))  # a register holds `LANES` floats, and there are 32
_SUMS = 16 if _WIDE else 4  # vectors of sums to which a tile of few rows is extended, by more panels
_MOST = 4  # most panels read at once
TILE = 8 if _WIDE else 6  # rows whose sums over a panel fit the processor's registers


@kernel
def _panels_of(rows):
    """The number of panels read at once if tiles have at most `rows` rows."""
    return max(1, min(_MOST, _SUMS // rows))


# (rows, panels) of a tile. If a pass has several tiles, all have the same number of rows, or one fewer.
_TILES = sorted(
    {(rows, _panels_of.py_func(rows)) for rows in range(1, TILE + 1)}
    | {(rows - 1, _panels_of.py_func(rows)) for rows in range(TILE // 2 + 1, TILE + 1)}
    | {(1, 1)}
)


class _Operands(NamedTuple):
    """The operands of a tile as LLVM values: arrays, their numba types, and where the tile is in them."""

    weights: object
    x: object
    outputs: Outputs
    number_types: dict
    depth: object  # stored numbers of an output, each for one input or two
    tile: Tile


def _add_tile(builder, operands, row_count, panel_count):
    """Emit code for some rows of a product and the outputs of some panels.

    Each panel is read once, in order, each number is widened once, and every sum stays in a register. A sum's terms are
    added in the order of inputs. So a sum does not depend on other rows or other panels.
    """
    weight_type, x_type = operands.number_types["weights"], operands.number_types["x"]
    widens = weight_type == types.uint32 and x_type == types.float32  # pairs of bfloat16s become floats
    kind = FLOAT if x_type == types.float32 else INT  # of x: a pair of bfloat16s is as wide as a float
    row_numbers = [builder.add(operands.tile.row, LONG(row)) for row in range(row_count)]
    lines = [row_of(builder, operands.x, number) for number in row_numbers]
    panel_size = builder.mul(operands.depth, LONG(LANES))
    first_offset = builder.mul(builder.sdiv(operands.tile.panel, LONG(LANES)), panel_size)
    offsets = [builder.add(first_offset, builder.mul(panel_size, LONG(panel))) for panel in range(panel_count)]
    panel_starts = [builder.gep(operands.weights.data, [offset]) for offset in offsets]
    prefetch_distances = distances_ahead(builder, panel_size, panel_count, operands.tile.turn, operands.tile.turns)

    def multiply(k, sums):
        at = builder.mul(k, LONG(LANES))
        for start, distance in zip(panel_starts, prefetch_distances, strict=True):
            prefetch_line(builder, builder.gep(start, [builder.add(at, distance)]))
        vectors = [load_floats(builder, start, at, weight_type) for start in panel_starts]
        input_vectors = zip(*(split_pairs(builder, pairs) for pairs in vectors), strict=True) if widens else [vectors]
        for step, panel_vectors in enumerate(input_vectors):
            input_ = builder.add(builder.mul(k, LONG(2)), LONG(step)) if widens else k
            factors = [splat(builder, builder.load(address_at(builder, line, input_, kind), align=4)) for line in lines]
            terms = [(vector, factor) for factor in factors for vector in panel_vectors]
            sums = [add_product(builder, total, *term) for total, term in zip(sums, terms, strict=True)]
        return sums

    sums = loop(builder, operands.depth, [ZEROS] * (row_count * panel_count), multiply)
    columns = [builder.add(operands.tile.panel, LONG(panel * LANES)) for panel in range(panel_count)]
    bias_scales = [operands.outputs.biases_and_scales(builder, column) for column in columns]
    for index, total in enumerate(sums):
        row, panel = divmod(index, panel_count)
        operands.outputs.put(builder, total, bias_scales[panel], row_numbers[row], columns[panel])


@intrinsic
def _multiply_tile(context, linear, x, out, depth, tile, in_bf16):
    """One of `_TILES`; see `by_vectors`."""

    def make(context, builder, signature, arguments):
        weights = cgutils.unpack_tuple(builder, arguments[0])[0]
        of_weights, of_x = arrays_of(context, builder, (linear.types[0], x), (weights, arguments[1]))
        outputs = Outputs.of(context, builder, (linear, out), (arguments[0], arguments[2]), arguments[5])
        number_types = {"weights": linear.types[0].dtype, "x": x.dtype}
        depth, tile = arguments[3], Tile(*cgutils.unpack_tuple(builder, arguments[4]))
        tile_cases = {rows * (_MOST + 1) + panels: (rows, panels) for rows, panels in _TILES}
        tile_key = builder.add(builder.mul(tile.rows, LONG(_MOST + 1)), tile.panels)
        operands = _Operands(of_weights, of_x, outputs, number_types, depth, tile)
        switch_between(builder, tile_cases, tile_key, lambda case: _add_tile(builder, operands, *tile_cases[case]))
        return context.get_dummy_value()

    return types.void(linear, x, out, depth, tile, types.boolean), make


@kernel
def by_vectors(linear, x, rows, begin, end, in_bf16, out):
    """`passes.product` for weights other than uint64 and int64: outputs begin … end − 1 of rows of x, to `out`."""
    depth, turn_count = linear.inputs // weights_in(linear.weights), -(-rows // TILE)
    panel_count = _panels_of(-(-rows // turn_count))
    if end - begin < panel_count * PANEL:  # very few outputs: use the smallest tile
        turn_count, panel_count = rows, 1
    for panel_begin in range(begin, end, panel_count * PANEL):
        panel = min(panel_begin, end - panel_count * PANEL)  # the last panels may be computed twice
        row = 0
        for turn in range(turn_count):
            turn_rows = (rows - row + turn_count - turn - 1) // (turn_count - turn)  # nearly as many in each turn
            _multiply_tile(linear, x, out, depth, Tile(row, turn_rows, panel, panel_count, turn, turn_count), in_bf16)
            row += turn_rows
