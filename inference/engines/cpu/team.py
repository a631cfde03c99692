"""PyTorch's own threads for compiled functions of ours.

Threads of our own would be in the way of PyTorch's. Between two of its operations OpenMP's threads do not sleep: they
look for work, each on a core of its own. So it is them that are asked, by the call that compilers make of `#pragma omp
parallel`. Where PyTorch has no OpenMP that is found, one thread does it all.
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
    """OpenMP's way to run a function in all threads, and the addresses of the functions that tell a thread its number
    and how many there are. 0: none."""

    parallel: "ctypes._NamedFuncPointer | None"
    thread: int
    threads: int


@cache
def team() -> Team:
    """That of the OpenMP library to which PyTorch's own calls go, whatever others this process has loaded."""
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
    """Where Linux looks for the functions that PyTorch calls, in this order: among those that the whole process sees,
    then in PyTorch's library and what that is linked to."""
    if sys.platform == "linux":
        yield ctypes.CDLL(None)
    if sys.platform == "linux" and TORCH.exists():
        yield ctypes.CDLL(str(TORCH))


def _address(function: "ctypes._NamedFuncPointer") -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def most_threads() -> int:
    """How many threads `call_in_team` takes at most."""
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
