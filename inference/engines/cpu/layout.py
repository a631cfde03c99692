"""The layout of a linear layer's weights for the CPU engine, its multiply kernels, and calls of compiled functions.

The weights of `PANEL` (16) outputs stand together, input by input: a panel. A way is a kernel that multiplies them. An
entry is a compiled C function; its argument is the address of a table of int64s, with addresses and sizes at the
indices that `entries` defines. Weights by codes (`CodedLinear`) stay quantised, as their file stores them.

Separate threads would compete with PyTorch's. Between two of its operations OpenMP's threads do not sleep: they spin,
each on its own core. So our functions run in these threads, by the call that compilers generate for `#pragma omp
parallel`. If PyTorch's OpenMP is not found, one thread does all the work.
"""

import ctypes
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numba.core.ccallback import CFunc
from torch import Tensor

from outrider.base.progress import Stage
from outrider.draft_models.targets.coded import CodedLinear
from outrider.draft_models.targets.int8 import Int8Linear, Linear
from outrider.inference.engines.cpu import entries
from outrider.inference.engines.cpu.by_amx import STEP, has_amx
from outrider.inference.engines.cpu.by_vectors import DOTS, TILE
from outrider.inference.engines.cpu.code_panels import code_table
from outrider.inference.engines.cpu.elementwise import HAS_BYTES
from outrider.inference.engines.cpu.entries import NumberType
from outrider.inference.engines.cpu.recorded import settle
from outrider.inference.engines.cpu.vectors import PANEL

TORCH_LIB = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # the library with PyTorch's own loops


class Team(NamedTuple):
    """OpenMP's function that runs a function in all threads, and the addresses of the functions that return a thread's
    number and the number of threads. 0: none."""

    parallel: "ctypes._NamedFuncPointer | None"
    thread: int
    threads: int


@cache
def team() -> Team:
    """The team of the OpenMP library that PyTorch itself calls, whatever others this process has loaded."""
    for library in _where_torch_looks():
        try:
            parallel = library.GOMP_parallel
            omp_addresses = [_c_address(library.omp_get_thread_num), _c_address(library.omp_get_num_threads)]
        except AttributeError:
            continue
        parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return Team(parallel, *omp_addresses)
    return Team(None, 0, 0)


def _where_torch_looks() -> "Iterator[ctypes.CDLL]":
    """The libraries in which Linux looks up the functions that PyTorch calls, in order: the global symbols of the
    process, then PyTorch's library and its dependencies."""
    if sys.platform == "linux":
        yield ctypes.CDLL(None)
    if sys.platform == "linux" and TORCH_LIB.exists():
        yield ctypes.CDLL(str(TORCH_LIB))


def _c_address(function: "ctypes._NamedFuncPointer") -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def most_threads() -> int:
    """The most threads that `call_in_team` can use."""
    return torch.get_num_threads() if team().parallel is not None else 1


def call_in_team(function_address: int, argument: int, threads: int) -> None:
    """Call the C function void f(int64) at an address in `threads` threads at once, each with `argument`."""
    parallel = team().parallel
    if threads == 1 or parallel is None:  # OpenMP would end its other threads for a team of one
        _alone(function_address)(argument)
    else:
        parallel(function_address, argument, threads, 0)


@cache
def _alone(function: int) -> "ctypes._CFunctionType":
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(function)


SHARE = 2**15  # bytes of weights per thread from which on several threads pay
Make = Callable[..., CFunc]  # one of `entries`, for some `NumberType`
STORED: dict[torch.dtype, NumberType] = {  # the bits of 16-bit floats, as integers
    torch.float32: np.float32, torch.bfloat16: np.uint16, torch.float16: np.int16, torch.int8: np.int8,
    torch.int64: np.int64,
}  # fmt: skip
_TRIAL_SIZE = (16 * PANEL, 512)  # outputs and inputs of a timed product
_REPEATS = 20  # timed products, after one that is not
Way = Literal["floats", "pairs", "amx", "codes"]


class WeightLayout(NamedTuple):
    """The layout of weights, and the dtypes of computations with them."""

    weight_dtype: torch.dtype  # of the stored weights
    together: int  # adjacent inputs of an output that are stored together: 2 for bfloat16s, else 1
    way: Way  # the multiply kernel: one weight, pairs of bfloat16s, by AMX, or by codes
    dtype: torch.dtype  # of activations and results

    @classmethod
    def of(cls, linears: Sequence[Linear], dtype: torch.dtype) -> "WeightLayout":
        """The layout for some layers of one type on this processor."""
        if isinstance(linears[0], CodedLinear):
            return cls(torch.int64, 1, "codes", dtype)
        weight_dtype = fewest_bytes(linears)
        if weight_dtype != torch.bfloat16 or any(linear.in_features % 2 for linear in linears):
            return cls(weight_dtype, 1, "floats", dtype)
        fits_steps = all(linear.in_features % STEP == 0 for linear in linears)
        able = [way for way in ways() if way != "amx" or fits_steps]
        if dtype != torch.bfloat16 and "pairs" in able:  # float32s would lose their lower digits
            able.remove("pairs")
        choice_key = f"bfloat16 weights in {_name(dtype)}" + ("" if fits_steps else f" (inputs in no steps of {STEP})")
        way = settle(  # as recorded by a run that is resumed; else AMX, by far the fastest, or the fastest in a timing
            choice_key, able, lambda: "amx" if "amx" in able else min(able, key=lambda w: seconds_of_product(w, dtype))
        )
        return cls(weight_dtype, 2, way, dtype)

    @property
    def parts(self) -> int:
        """The number of bfloat16s whose sum is a number of x in `operand`; 1 if numbers are not split."""
        return entries.parts_of(self._numbers, STORED[self.dtype])

    @property
    def read(self) -> torch.dtype:
        """The dtype of the operand by which weights are multiplied."""
        in_float32 = self.way == "floats" or (self.way == "codes" and not (HAS_BYTES and self.dtype == torch.bfloat16))
        return torch.float32 if in_float32 else torch.bfloat16

    @property
    def _numbers(self) -> NumberType:
        """The type by which kernels read weights: pairs of bfloat16s are uint32, or uint64 (two pairs) for AMX."""
        if self.way == "amx":
            return np.uint64
        return np.uint32 if self.together == 2 else STORED[self.weight_dtype]

    def entry(self, make_entry: Make) -> int:
        """The address of one of `entries` for this layout."""
        return _address(make_entry, self._numbers, self.read, self.dtype)

    def panels(self, linear: Linear) -> Tensor:
        """A layer's weights in this layout; of codes the table of their panels."""
        if isinstance(linear, CodedLinear):
            x_dtype = torch.int8 if self.read == torch.bfloat16 else self.read  # rows are rounded to int8
            return code_table(linear.parts, lambda kind: _address(entries.codes_entry, kind, x_dtype, self.dtype))
        weight = linear.codes if isinstance(linear, Int8Linear) else linear.weight.detach().to(self.weight_dtype)
        return in_panels(weight, self.together)

    def numbers(self, linear: Linear) -> int:
        """How many numbers `panels` returns for a layer."""
        if self.way == "codes":
            return 2 * (linear.out_features // PANEL)  # two addresses of each panel
        return linear.out_features * linear.in_features

    def operand(self, x: Tensor) -> Tensor:
        """x [rows, in] of `dtype` as products read it, [parts · rows, in]."""
        if self.parts == 1:
            return x.contiguous().to(self.read)
        parts = []
        for _ in range(self.parts):
            parts.append(x.to(self.read))
            x = x - parts[-1]
        return torch.cat(parts)


def fewest_bytes(linears: Sequence[Linear]) -> torch.dtype:
    """The smallest dtype that holds the weights of layers of one type exactly: bfloat16 if they were bfloat16s once."""
    if isinstance(linears[0], Int8Linear):
        return torch.int8
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(linear.weight.to(dtype).to(linear.weight.dtype), linear.weight) for linear in linears):
            return dtype
    return torch.float32


def in_panels(weight: Tensor, pair_size: int = 1) -> Tensor:
    """A weight [out, in] in the order in which the kernels read it: panels [out / PANEL, in, PANEL], flattened. With
    pair_size adjacent inputs of an output stored together: [out / PANEL, in / pair_size, PANEL, pair_size]."""
    return weight.view(-1, PANEL, weight.shape[1] // pair_size, pair_size).transpose(1, 2).flatten()


def out_of_panels(panels: Tensor, output_count: int, pair_size: int) -> Tensor:
    """The weight [outputs, in] that `in_panels` was given."""
    by_output = panels.view(output_count // PANEL, -1, PANEL, pair_size).transpose(1, 2)
    return by_output.reshape(output_count, -1)


@cache
def _address(make: Make, weights: NumberType | int, operand: torch.dtype, dtype: torch.dtype) -> int:
    with Stage(f"compiling {make.__name__}"):  # weights: for `codes_entry` the number of a kind of codes
        address = make(weights, STORED[operand], STORED[dtype]).address
    assert address is not None
    return address


def call(entry: int, table: list[int], weight_bytes: int) -> None:
    """Call an entry with a table, in all threads if reading `weight_bytes` of weights is worth it, else in one."""
    # Never in some of them: OpenMP would end the others and start them again for PyTorch's next operation.
    threads = most_threads()
    if weight_bytes < SHARE * threads:
        threads = 1
    if threads > 1:
        table[entries.THREAD], table[entries.THREADS] = team().thread, team().threads
    c_table = array("q", table)
    call_in_team(entry, c_table.buffer_info()[0], threads)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def ways() -> tuple[Way, ...]:
    """The kernels by which this processor can multiply bfloat16s."""
    return ("floats", *(("pairs",) if DOTS else ()), *(("amx",) if has_amx() else ()))


@cache
def seconds_of_product(way: Way, dtype: torch.dtype) -> float:
    """Measured seconds of one thread for a product of `TILE` rows with weights in a near cache. On some processors the
    instruction for pairs takes as long as four products of floats."""
    output_count, input_count = _TRIAL_SIZE
    layout = WeightLayout(torch.bfloat16, 2, way, dtype)
    weights = torch.ones(output_count, input_count, dtype=torch.bfloat16)
    x, out = layout.operand(torch.ones(TILE, input_count, dtype=dtype)), torch.empty(TILE, output_count, dtype=dtype)
    unit_scales = torch.ones(output_count)
    entry = layout.entry(entries.product_entry)
    table = [0] * entries.TABLE
    table[entries.WEIGHTS], table[entries.SCALES], table[entries.BIASES], table[entries.X], table[entries.OUT] = (
        tensor.data_ptr() for tensor in (weights, unit_scales, unit_scales, x, out)
    )
    table[entries.ROWS], table[entries.INPUTS], table[entries.OUTPUTS] = TILE, input_count, output_count
    seconds = []
    for _ in range(1 + _REPEATS):
        started = time.perf_counter()
        call(entry, table, 0)  # 0 bytes: in one thread
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])  # the first one reads the weights into the cache
