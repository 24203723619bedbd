"""From a plan to the arrays of one bucket, and back to named arrays on the device.

All that the layers of a launch need travels as one int32 vector; `Layout` knows where each array lies in it. What
the sampler needs beside the hidden vectors follows in a vector of its own (`draws.py`), for the sampler is another
program.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int, Int32
from numpy.typing import NDArray

from orca_jax.exec.buckets import Segment, num_places
from orca_jax.exec.rows import RowTable
from orca_jax.exec.vector import VectorLayout
from orca_jax.step import Member


class Batch(NamedTuple):
    """One launch on the device. Requests stand in launch order, absent ones last; padding is a dummy, no branch."""

    ids: Int[Array, " T"]
    on_device: Bool[Array, " T"]  # the id is `last_token` of the token's row instead
    token_row: Int[Array, " T"]  # R for padding
    positions: Int[Array, " T"]
    query_start: Int[Array, " R"]
    query_len: Int[Array, " R"]
    context_len: Int[Array, " R"]
    page_table: Int[Array, "R P"]  # in one layer
    kept_token: Int[Array, " K"]  # tokens whose hidden vectors the sampler gets


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
    def num_kept(self) -> int:
        """K: no more tokens are kept than there are places in a sampler, or tokens."""
        return min(self.num_tokens, num_places(self.num_rows))

    @cached_property
    def vector(self) -> VectorLayout:
        """The arrays in their order."""
        tokens, rows = (self.num_tokens,), (self.num_rows,)
        shapes = {**dict.fromkeys(Batch._fields[:4], tokens), **dict.fromkeys(Batch._fields[4:7], rows)}
        return VectorLayout({**shapes, "page_table": (self.num_rows, self.num_pages), "kept_token": (self.num_kept,)})

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self.vector.size

    def views(self, vector: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """The arrays of a host vector, to be written in place."""
        return self.vector.views(vector)

    def unpack(self, vector: Int32[Array, " N"]) -> Batch:
        """The arrays of a device vector; traced."""
        out = self.vector.unpack(vector)
        out["on_device"] = out["on_device"] != 0
        return Batch(**out)


class Kept(NamedTuple):
    """The tokens of a launch that the sampler gets, in its order. Each draws the next token or is scored."""

    members: list[int]  # index in the plan
    targets: list[int | None]  # the id that follows, which is to be scored; None: the next token is drawn
    row: NDArray[np.int32]  # R where nothing is drawn
    context_len: NDArray[np.int32]  # the kept token included: the position of the token to be drawn

    @property
    def has_targets(self) -> bool:
        """Whether log probabilities of known ids are wanted."""
        return any(target is not None for target in self.targets)


def pack(
    members: Sequence[Member], segments: Sequence[Segment], rows: RowTable, layout: Layout
) -> tuple[NDArray[np.int32], Kept]:
    """Write one launch into a vector; no Python loop runs over tokens, scored ones apart.

    Returns:
        The vector, and the tokens that are kept for the sampler.
    """
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    count = np.array([size for _, _, size in segments], np.int32)
    first = np.array([members[index].start + offset for index, offset, _ in segments], np.int32)
    row = np.array([members[index].row for index, _, _ in segments], np.int32)
    end = np.cumsum(count, dtype=np.int32)
    start, total, used = end - count, int(end[-1]), len(segments)

    # Tokens.
    known, waiting = _ids(members, segments, end)
    is_known = np.ones(total, bool)
    is_known[waiting] = False
    view["ids"][np.flatnonzero(is_known)] = known
    view["on_device"][waiting] = 1
    view["token_row"][:total], view["token_row"][total:] = np.repeat(row, count), layout.num_rows
    view["positions"][:total] = np.arange(total, dtype=np.int32) + np.repeat(first - start, count)

    # Requests.
    view["query_start"][:used], view["query_len"][:used], view["context_len"][:used] = start, count, first + count
    view["page_table"][:used] = rows.page_table[row]

    # Kept tokens.
    places, owners, targets = _kept(members, segments, start.tolist())
    view["kept_token"][: len(places)] = places
    is_drawn = np.array([target is None for target in targets], bool)
    kept_row = np.where(is_drawn, row[owners], np.int32(layout.num_rows))
    kept = Kept([segments[i].member for i in owners], targets, kept_row, view["positions"][places] + 1)
    return vector, kept


def _kept(
    members: Sequence[Member], segments: Sequence[Segment], starts: Sequence[int]
) -> tuple[list[int], list[int], list[int | None]]:
    """Place in the batch, segment and target of each kept token: those with targets, and the newest of who samples."""
    places: list[int] = []
    owners: list[int] = []
    targets: list[int | None] = []
    for i, (index, offset, size) in enumerate(segments):
        member = members[index]
        if member.targets:
            scored = member.targets[offset : offset + size]
            places.extend(range(starts[i], starts[i] + len(scored)))
            owners.extend([i] * len(scored))
            targets.extend(scored)
        if member.samples and offset + size == member.num_tokens:
            places.append(starts[i] + size - 1)
            owners.append(i)
            targets.append(None)
    return places, owners, targets


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
