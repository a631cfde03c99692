# mypy: allow-untyped-defs
"""Primitives of compiled passes: numbers as they are stored (bfloat16s as their bits, uint16), and waits for threads.

numba compiles the function that an `@overload` returns for the arguments' types. `make` of an `@intrinsic` emits LLVM.
"""

import os

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

# Sums may be computed in any order, as all vectorised ones are. NaN stays NaN.
FAST = {"reassoc", "contract", "arcp", "nsz"}
# Not cached on disk: numba would check only a function's own file. `entries` caches its callers by all files here.
kernel = njit(nogil=True, _nrt=False, fastmath=FAST, error_model="numpy")  # type: ignore[call-overload]
_SPINS = 4096  # polls of a counter before a waiting thread yields its core
if hasattr(os, "sched_yield"):
    _yield_core = types.ExternalFunction("sched_yield", types.int32())
else:  # Windows: PyTorch's threads are not used there (see `team`), and none waits

    @kernel
    def _yield_core():
        return np.int32(0)


def wide(value):
    """The float32 of a stored number. In compiled code: see `_wide_of`."""


@overload(wide)
def _wide_of(value):
    if value == types.uint16:  # the upper half of a float32: a bfloat16
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: np.float32(value)


def put(array, index, value, in_bf16):
    """Store a float32 in a one-dimensional array, rounded to bfloat16 if the array holds bfloat16s or if `in_bf16`."""


@overload(put)
def _put_in(array, index, value, in_bf16):
    if array.dtype == types.uint16:

        def to_bits(array, index, value, in_bf16):
            array[index] = np.uint16(bits_of_bfloat16(value))

        return to_bits

    def to_float(array, index, value, in_bf16):
        array[index] = rounded(value, in_bf16)

    return to_float


@kernel
def bits_of_bfloat16(value):
    """The upper 16 bits of a float32, rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.float32(value).view(np.uint32)
    rounded_bits = np.uint32(bits + np.uint32(0x7FFF) + np.uint32((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint32(0x7FC0) if value != value else np.uint32(rounded_bits >> np.uint32(16))


@kernel
def rounded(value, in_bf16):
    """A float32, rounded to bfloat16 if `in_bf16`."""
    if in_bf16:
        return np.uint32(bits_of_bfloat16(value) << np.uint32(16)).view(np.float32)
    return np.float32(value)


@intrinsic
def array_at(context, address, like):
    """An address as a pointer to numbers of the type of those in the array `like`."""
    pointer_type = types.CPointer(like.dtype)

    def make(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(pointer_type))

    return pointer_type(types.int64, like), make


@intrinsic
def array_of(context, address, shape, like):
    """An array at an address, of the type of numbers of `like`; unlike numba's `carray`, also in a `kernel`."""
    array_type = types.Array(like.dtype, len(shape), "C")

    def make(context, builder, signature, arguments):
        shape = cgutils.unpack_tuple(builder, arguments[1])
        itemsize = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
        strides = [ir.Constant(ir.IntType(64), itemsize)]
        for length in reversed(shape[1:]):
            strides.insert(0, builder.mul(strides[0], length))
        structure = context.make_array(array_type)(context, builder)
        data = builder.inttoptr(arguments[0], structure.data.type)
        populate_array(structure, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
        return structure._getvalue()

    return array_type(types.int64, shape, like), make


@intrinsic
def arrive(context, counter):
    """Add 1 to counter[0] atomically."""

    def make(context, builder, signature, arguments):
        array = context.make_array(counter)(context, builder, arguments[0])
        builder.atomic_rmw("add", array.data, ir.Constant(ir.IntType(64), 1), "seq_cst")
        return context.get_dummy_value()

    return types.void(counter), make


@intrinsic
def arrived(context, counter):
    """counter[0], read atomically."""

    def make(context, builder, signature, arguments):
        array = context.make_array(counter)(context, builder, arguments[0])
        return builder.load_atomic(array.data, ordering="seq_cst", align=8)

    return types.int64(counter), make


@kernel
def wait(counter, threads, turn):
    """Wait until all threads have called this for the `turn`-th time, counted from 1. counter int64 [1]: 0 at first."""
    if threads == 1:
        return
    arrive(counter)
    spins = 0
    while arrived(counter) < threads * turn:
        spins += 1
        if spins > _SPINS:
            _yield_core()
