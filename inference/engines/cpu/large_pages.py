"""Large pages for the memory of weights: the CPU translates fewer addresses, and prefetches up to a page's end."""

import ctypes
import mmap
import sys

from torch import Tensor

LARGE = 2 * 2**20  # bytes of a large page on most machines
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1 and later: move existing memory to large pages now


def in_large_pages(tensor: Tensor) -> Tensor:
    """`tensor`, contiguous and on a CPU, with its memory in large pages as far as the system provides them."""
    begin = -(-tensor.data_ptr() // LARGE) * LARGE  # the address of the first large page that begins in it
    byte_count = (tensor.data_ptr() + tensor.nbytes) // LARGE * LARGE - begin
    if sys.platform == "linux" and byte_count > 0:
        advise = ctypes.CDLL(None).madvise
        for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):  # a refusal changes nothing
            advise(ctypes.c_void_p(begin), ctypes.c_size_t(byte_count), ctypes.c_int(advice))
    return tensor
