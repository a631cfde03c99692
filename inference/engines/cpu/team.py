"""PyTorch's own threads for our compiled functions.

Separate threads would compete with PyTorch's. Between two of its operations OpenMP's threads do not sleep: they spin,
each on its own core. So our functions run in these threads, by the call that compilers generate for `#pragma omp
parallel`. If PyTorch's OpenMP is not found, one thread does all the work.
"""

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

TORCH = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # the library with PyTorch's own loops


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
            numbers = [_address(library.omp_get_thread_num), _address(library.omp_get_num_threads)]
        except AttributeError:
            continue
        parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return Team(parallel, *numbers)
    return Team(None, 0, 0)


def _where_torch_looks() -> "Iterator[ctypes.CDLL]":
    """The libraries in which Linux looks up the functions that PyTorch calls, in order: the global symbols of the
    process, then PyTorch's library and its dependencies."""
    if sys.platform == "linux":
        yield ctypes.CDLL(None)
    if sys.platform == "linux" and TORCH.exists():
        yield ctypes.CDLL(str(TORCH))


def _address(function: "ctypes._NamedFuncPointer") -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def most_threads() -> int:
    """The most threads that `call_in_team` can use."""
    return torch.get_num_threads() if team().parallel is not None else 1


def call_in_team(function: int, given: int, threads: int) -> None:
    """Call the C function void f(int64) at an address in `threads` threads at once, each with `given`."""
    parallel = team().parallel
    if threads == 1 or parallel is None:  # OpenMP would end its other threads for a team of one
        _alone(function)(given)
    else:
        parallel(function, given, threads, 0)


@cache
def _alone(function: int) -> "ctypes._CFunctionType":
    return ctypes.CFUNCTYPE(None, ctypes.c_int64)(function)
