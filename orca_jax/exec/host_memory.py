"""Advice to Linux about the memory of arrays on CPUs. Without effect on other systems."""

import ctypes
import mmap
import sys
from collections.abc import Iterable

import jax

_LARGE_PAGE = 2 << 20  # bytes
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux; Python 3.12 does not have the second one


def give_back(arrays: Iterable[jax.Array]) -> None:
    """Give the memory of arrays back to the system, which gives zeros at the next use of each part.

    Nothing may be written to them meanwhile.
    """
    _advise(arrays, mmap.PAGESIZE, mmap.MADV_DONTNEED)


def use_large_pages(arrays: Iterable[jax.Array]) -> None:
    """Move the memory of arrays to pages of 2 MiB, if the system has them.

    A processor fetches memory ahead within a page only, and finds a page quicker if there are fewer of them: a core
    reads matrices 1.15 to 1.25 times as fast (docs/kernels.md).
    """
    _advise(arrays, _LARGE_PAGE, _MADV_HUGEPAGE, _MADV_COLLAPSE)


def _advise(arrays: Iterable[jax.Array], page: int, *advices: int) -> None:
    """Give advice about all whole pages in the memory of arrays; what the system refuses has no effect."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for shard in [shard.data for array in arrays for shard in jax.block_until_ready(array).addressable_shards]:
        start = shard.unsafe_buffer_pointer()
        first, last = -(-start // page) * page, (start + shard.nbytes) // page * page
        for advice in advices if first < last else ():
            madvise(first, last - first, advice)
