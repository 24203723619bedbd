"""Advice to Linux about the memory of arrays on CPUs. Without effect on other systems."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable

import jax

from orca_jax.values.cache_spec import ceil_div

_LARGE_PAGE = 2 << 20  # bytes
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux; Python 3.12 does not have the second one


def give_back(arrays: Iterable[jax.Array]) -> None:
    """Give the memory of arrays back to the system, which gives zeros at the next use of each part.

    Nothing may be written to them meanwhile.
    """
    if sys.platform == "linux":
        _advise(_whole_pages(arrays, mmap.PAGESIZE), mmap.MADV_DONTNEED)


def use_large_pages(arrays: Iterable[jax.Array]) -> threading.Thread | None:
    """Begin to move the memory of arrays to pages of 2 MiB, if the system has them, in a thread that is returned.

    A processor fetches memory ahead within a page only, and finds a page quicker if there are fewer of them: a core
    reads matrices 1.15 to 1.25 times as fast (docs/decisions.md). Moving a GiB takes about a second.
    """
    if sys.platform != "linux":
        return None
    parts = _whole_pages(arrays, _LARGE_PAGE)
    thread = threading.Thread(
        target=_advise, args=(parts, _MADV_HUGEPAGE, _MADV_COLLAPSE), daemon=True
    )
    thread.start()
    return thread


def _whole_pages(arrays: Iterable[jax.Array], page: int) -> list[tuple[int, int]]:
    """The first and the last address of the whole pages in each array; none for those without a whole page."""
    parts: list[tuple[int, int]] = []
    for array in arrays:
        for shard in jax.block_until_ready(array).addressable_shards:
            start = shard.data.unsafe_buffer_pointer()
            first = ceil_div(start, page) * page
            last = (start + shard.data.nbytes) // page * page
            if first < last:
                parts.append((first, last))
    return parts


def _advise(parts: Iterable[tuple[int, int]], *advices: int) -> None:
    """Give advice about parts of the memory. What the system refuses has no effect."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, last in parts:
        for advice in advices:
            madvise(first, last - first, advice)
