"""From a plan to the arrays of one bucket, and back to named arrays on the device.

All of a launch travels as one int32 vector, one transfer instead of fifteen. `Layout` knows where each array lies in
it; `RowTable` is the host's copy of what each row holds between iterations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32
from numpy.typing import NDArray

from orca_jax.exec.buckets import Segment
from orca_jax.step import Member


class Batch(NamedTuple):
    """One launch on the device. Requests stand in launch order, absent ones last; padding is a dummy, no branch."""

    ids: Int[Array, " T"]
    on_device: Bool[Array, " T"]  # the id is `last_token` of the token's row instead
    token_row: Int[Array, " T"]
    positions: Int[Array, " T"]
    query_start: Int[Array, " R"]
    query_len: Int[Array, " R"]
    context_len: Int[Array, " R"]
    page_table: Int[Array, "R P"]  # in one layer
    sample_token: Int[Array, " B"]  # where in the batch the sampled hidden vector is
    sample_row: Int[Array, " B"]  # R for padding
    sample_position: Int[Array, " B"]  # of the token to be drawn
    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    seed_high: Int[Array, " B"]
    seed_low: Int[Array, " B"]


_FLOATS = {"temperature", "top_p"}


@dataclass(frozen=True)
class Layout:
    """Where each array of a `Batch` lies in the vector of a launch.

    Args:
        num_tokens: T, a bucket.
        num_rows: R.
        num_pages: P, pages of the longest possible request.
    """

    num_tokens: int
    num_rows: int
    num_pages: int

    @property
    def num_samples(self) -> int:
        """B: no more rows can sample than there are rows, or tokens."""
        return min(self.num_tokens, self.num_rows)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each array by name."""
        tokens, rows, samples = (self.num_tokens,), (self.num_rows,), (self.num_samples,)
        per_token = dict.fromkeys(Batch._fields[:4], tokens)
        per_row = dict.fromkeys(Batch._fields[4:7], rows)
        per_sample = dict.fromkeys(Batch._fields[8:], samples)
        return {**per_token, **per_row, "page_table": (self.num_rows, self.num_pages), **per_sample}

    @cached_property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def views(self, vector: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """The arrays of a host vector, to be written in place; floats are views too."""
        out: dict[str, NDArray[Any]] = {}
        start = 0
        for name, shape in self.shapes.items():
            part = vector[start : start + math.prod(shape)].reshape(shape)
            out[name] = part.view(np.float32) if name in _FLOATS else part
            start += part.size
        return out

    def unpack(self, vector: Int32[Array, " N"]) -> Batch:
        """The arrays of a device vector; traced."""
        out, start = {}, 0
        for name, shape in self.shapes.items():
            part = lax.slice_in_dim(vector, start, start + math.prod(shape)).reshape(shape)
            start += part.size
            out[name] = lax.bitcast_convert_type(part, jax.numpy.float32) if name in _FLOATS else part
        out["on_device"] = out["on_device"] != 0
        return Batch(**out)


class RowTable:
    """What each row holds: pages, and the sampling parameters of its request. Plans bring only what changed."""

    def __init__(self, num_rows: int, num_pages: int) -> None:
        self.page_table = np.zeros((num_rows, num_pages), np.int32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.seed_high = np.zeros(num_rows, np.int32)
        self.seed_low = np.zeros(num_rows, np.int32)

    def update(self, members: Sequence[Member]) -> None:
        """Take in what a plan changes."""
        for member in members:
            if member.new_pages:
                first = member.num_old_pages
                self.page_table[member.row, first : first + len(member.new_pages)] = member.new_pages
            if member.sampling is not None:
                row, sampling = member.row, member.sampling
                self.temperature[row], self.top_k[row] = sampling.temperature, sampling.top_k
                self.top_p[row] = sampling.top_p
                high, low = divmod(sampling.seed % 2**64, 2**32)
                self.seed_high[row], self.seed_low[row] = np.array([high, low], np.uint32).view(np.int32)


def pack(
    members: Sequence[Member], segments: Sequence[Segment], rows: RowTable, layout: Layout
) -> tuple[NDArray[np.int32], list[int]]:
    """Write one launch into a vector; no Python loop runs over tokens.

    Returns:
        The vector, and for each sampling place in use the index of its member in the plan.
    """
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    count = np.array([segment.size for segment in segments], np.int32)
    first = np.array([members[segment.member].start + segment.offset for segment in segments], np.int32)
    row = np.array([members[segment.member].row for segment in segments], np.int32)
    end = np.cumsum(count, dtype=np.int32)
    start, total, used = end - count, int(end[-1]), len(segments)

    # Tokens.
    known, waiting = _ids(members, segments, end)
    is_known = np.ones(total, bool)
    is_known[waiting] = False
    view["ids"][np.flatnonzero(is_known)] = known
    view["on_device"][waiting] = 1
    token_row = np.repeat(row, count)
    position = np.arange(total, dtype=np.int32) + np.repeat(first - start, count)
    view["token_row"][:total] = token_row
    view["positions"][:total] = position

    # Requests.
    view["query_start"][:used], view["query_len"][:used], view["context_len"][:used] = start, count, first + count
    view["page_table"][:used] = rows.page_table[row]

    # Sampling rows.
    sampling = [
        i
        for i, (index, offset, size) in enumerate(segments)
        if members[index].samples and offset + size == members[index].num_tokens
    ]
    number = len(sampling)
    sample_row = row[sampling]
    view["sample_token"][:number] = end[sampling] - 1
    view["sample_row"][:number], view["sample_row"][number:] = sample_row, layout.num_rows
    view["sample_position"][:number] = (first + count)[sampling]
    for name in ("temperature", "top_k", "top_p", "seed_high", "seed_low"):
        view[name][:number] = getattr(rows, name)[sample_row]
    return vector, [segments[i].member for i in sampling]


def _ids(
    members: Sequence[Member], segments: Sequence[Segment], end: NDArray[np.int32]
) -> tuple[NDArray[np.int32], list[int]]:
    """Ids that the host knows, in order, and the places in the batch of those that it does not."""
    waiting = [
        int(end[i]) - 1
        for i, (index, offset, size) in enumerate(segments)
        if members[index].last_on_device and offset + size == members[index].num_tokens
    ]
    known = chain.from_iterable([_slice(members[index].ids, offset, size) for index, offset, size in segments])
    return np.fromiter(known, np.int32), waiting


def _slice(ids: Sequence[int], offset: int, size: int) -> Sequence[int]:
    """`ids[offset : offset + size]`, without a copy where that is all of them."""
    return ids if not offset and size >= len(ids) else ids[offset : offset + size]
