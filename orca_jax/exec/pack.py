"""Packing: a plan becomes one int32 vector for each launch, and named arrays again on the device.

The vector has all inputs of the layers except weights and state; `Layout` has the offset of each array in it. The
sampler is another program, with its own vector beside the hidden vectors (`sampling/programs.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32
from numpy.typing import NDArray

from orca_jax.exec.buckets import Segment, sampler_width
from orca_jax.exec.rows import RowTable
from orca_jax.kernels.ragged_attention import RowArrays
from orca_jax.kernels.state_rows import StateRows
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.step import Member


@dataclass(frozen=True)
class VectorLayout:
    """Many small arrays as one vector of 32-bit words: one transfer to the device instead of fifteen.

    Args:
        shapes: the shapes of each array by name, in order.
        floats: names of the arrays of float32; the others hold int32.
    """

    shapes: Mapping[str, tuple[int, ...]]
    floats: frozenset[str] = field(default=frozenset())

    @cached_property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @cached_property
    def places(self) -> Mapping[str, slice]:
        """The place of each array in the vector."""
        ends = list(accumulate(math.prod(shape) for shape in self.shapes.values()))
        pairs = zip([0, *ends], ends, strict=False)
        return {name: slice(*pair) for name, pair in zip(self.shapes, pairs, strict=True)}

    def views(self, vector: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """The arrays of a host vector, to be written in place; floats are views too."""
        out: dict[str, NDArray[Any]] = {}
        for name, shape in self.shapes.items():
            part = vector[self.places[name]].reshape(shape)
            if name in self.floats:
                part = part.view(np.float32)
            out[name] = part
        return out

    def unpack(self, vector: Int32[Array, " N"]) -> dict[str, Array]:
        """The arrays of a device vector; traced."""
        out: dict[str, Array] = {}
        for name, shape in self.shapes.items():
            place = self.places[name]
            part = lax.slice_in_dim(vector, place.start, place.stop).reshape(shape)
            if name in self.floats:
                part = lax.bitcast_convert_type(part, jnp.float32)
            out[name] = part
        return out


class Batch(NamedTuple):
    """One launch on the device. Requests are in launch order, absent ones last. Padding is a dummy, not a branch."""

    ids: Int[Array, " T"]
    on_device: Bool[Array, " T"]  # the id is `last_token` of the token's row instead
    token_row: Int[Array, " T"]  # R for padding
    positions: Int[Array, " T"]
    requests: tuple[RowArrays, ...]  # blocks of each group of layers
    kept_token: Int[Array, " K"]  # tokens whose hidden vectors go to the sampler
    slot: Int[Array, " T"] | None = None  # of each token's adapter; None if no token has one
    states: StateRows | None = None  # None for models without states


class GroupTables(NamedTuple):
    """The page tables of all groups with one window, in a launch's vector."""

    name: str
    window: int | None
    num_groups: int
    width: int  # entries of a row

    @property
    def first_page(self) -> str:
        """The name of the array with the page of the first entry of each row, for groups with a window."""
        return f"first_{self.name}"


@dataclass(frozen=True)
class Layout:
    """The layout of a launch's vector, with all arrays of a `Batch`.

    A group with a window has only those entries of a row that its tokens in this launch need. The device counts its
    positions from the first of these pages on. So no kernel reads an entry that the row gave back, and tables do not
    grow with the context.

    Args:
        num_tokens: T, a bucket.
        num_rows: R.
        num_pages: P, pages of the longest possible request.
        has_slots: the tokens have slots of adapters.
        num_drafts: most proposed tokens of a launch.
        windows: the windows of each group of layers, equal ones side by side.
        page_size: S, for windows.
        has_states: requests have blocks of states.
    """

    num_tokens: int
    num_rows: int
    num_pages: int
    has_slots: bool = False
    num_drafts: int = 0
    windows: tuple[int | None, ...] = (None,)
    page_size: int = 1
    has_states: bool = False

    @property
    def num_kept(self) -> int:
        """K: tokens to keep at most, bounded by the width of the largest sampler and by the tokens."""
        return min(self.num_tokens, sampler_width(self.num_rows + self.num_drafts))

    @cached_property
    def tables(self) -> tuple[GroupTables, ...]:
        """The page tables in the order of the groups."""
        counts = [(window, len(list(groups))) for window, groups in groupby(self.windows)]
        return tuple(
            GroupTables(
                f"page_table_{index}" if index else "page_table", *each, self._width(each[0])
            )
            for index, each in enumerate(counts)
        )

    def _width(self, window: int | None) -> int:
        """Pages that the tokens of a row in one launch need at most."""
        if window is None:
            return self.num_pages
        return min(self.num_pages, ceil_div(window + self.num_tokens - 2, self.page_size) + 1)

    @cached_property
    def vector(self) -> VectorLayout:
        """The arrays in their order."""
        names = ["ids", "on_device", "token_row", "positions"]
        if self.has_slots:
            names.append("slot")
        rows = ["query_start", "query_len", "context_len"]
        if self.has_states:
            rows += ["source", "target"]
        per_token = dict.fromkeys(names, (self.num_tokens,))
        per_row = dict.fromkeys(rows, (self.num_rows,))
        others: dict[str, tuple[int, ...]] = {}
        for each in self.tables:
            if each.window is not None:
                others[each.first_page] = (self.num_rows,)
            others[each.name] = (self.num_rows, each.width)
            if each.num_groups > 1:
                others[each.name] = (each.num_groups, self.num_rows, each.width)
        return VectorLayout({**per_token, **per_row, **others, "kept_token": (self.num_kept,)})

    @cached_property
    def has_moving_blocks(self) -> bool:
        """True if the blocks of a row depend on its position: those of windows and of states do."""
        return self.has_states or any(window is not None for window in self.windows)

    @property
    def size(self) -> int:
        """Length of the vector."""
        return self.vector.size

    def views(self, vector: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """The arrays of a host vector, to be written in place."""
        return self.vector.views(vector)

    def step(self, used: int) -> NDArray[np.int32]:
        """The change of the vector by the next token of the first `used` rows, of one token each."""
        step = np.zeros(self.size, np.int32)
        view = self.views(step)
        view["positions"][:used] = 1
        view["context_len"][:used] = 1
        return step

    def write_blocks(
        self,
        view: Mapping[str, NDArray[Any]],
        blocks: NDArray[np.int32],
        row: NDArray[np.int32],
        first: NDArray[np.int32],
    ) -> None:
        """Write the page tables of a launch.

        Args:
            view: a part of the vector, from `views`.
            blocks: [groups, rows, P] of `RowTable`.
            row: the row of each request in the launch.
            first: position of its first token there.
        """
        used = len(row)
        begin = 0
        for each in self.tables:
            own = blocks[begin : begin + each.num_groups]
            begin += each.num_groups
            table = view[each.name].reshape(each.num_groups, self.num_rows, each.width)[:, :used]
            if each.window is None:
                table[:] = own.take(row, axis=1)
                continue
            page = np.maximum(first - (each.window - 1), 0) // self.page_size
            view[each.first_page][:used] = page
            columns = np.minimum(page[:, None] + np.arange(each.width), self.num_pages - 1)
            table[:] = own[:, row[:, None], columns]

    def unpack(self, vector: Int32[Array, " N"]) -> Batch:
        """The arrays of a device vector; traced."""
        out = self.vector.unpack(vector)
        out["on_device"] = out["on_device"] != 0
        start, size, context = (
            out.pop(name) for name in ("query_start", "query_len", "context_len")
        )
        states = None
        if self.has_states:
            source = out.pop("source")
            target = out.pop("target")
            states = StateRows(start, size, jnp.maximum(source, 0), target, source < 0)
        requests: list[RowArrays] = []
        for each in self.tables:
            table = out.pop(each.name)
            length = context
            if each.window is not None:
                length = context - self.page_size * out.pop(each.first_page)
            parts = [table]
            if each.num_groups > 1:
                parts = [table[index] for index in range(each.num_groups)]
            requests += [RowArrays(part, start, size, length) for part in parts]
        return Batch(requests=tuple(requests), states=states, **out)


class PooledTokens(NamedTuple):
    """Kept tokens of one member for the embedding of its request, at consecutive places among the hidden vectors."""

    member: int  # index in the plan
    first_place: int  # index of the first token among the hidden vectors of the launch
    size: int
    position: int  # of the first one in its request
    is_last: bool  # True if the last token of the member is among them


class Kept(NamedTuple):
    """The tokens of a launch for the sampler, in its order. The sampler draws or scores the token after each."""

    members: list[int]  # index in the plan
    targets: list[int | None]  # the following id, to be scored; None: the next token is drawn
    row: NDArray[np.int32]  # R if no token is drawn
    # the row with the drawn token as its last one; R: the host decides about it
    last_row: NDArray[np.int32]
    context_len: NDArray[np.int32]  # the kept token included: the position of the token to be drawn
    request_row: NDArray[np.int32]  # the row of the token's request, also of one that is scored
    pooled: Sequence[PooledTokens] = ()  # after those for the sampler

    @property
    def has_targets(self) -> bool:
        """True if log probabilities of known ids are requested."""
        return any(target is not None for target in self.targets)


class PackedIncrements(NamedTuple):
    """A launch of one token for each member of a plan: the token that the devices drew last."""

    layout: Layout
    members: Sequence[Member]
    vector: NDArray[np.int32]  # the devices may still read it
    kept: Kept
    step: NDArray[np.int32]  # from this vector to that of the next launch


class Packer:
    """Packs launches one after the other.

    In decode most launches equal earlier ones but for positions, so they are made from the earlier vectors. The
    program of the layers leaves nothing else in the caches of a processor, and there this takes a fifth of the time of
    `pack`.
    """

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._earlier: dict[int, PackedIncrements] = {}  # by the row of the first member

    def pack(
        self, members: Sequence[Member], segments: Sequence[Segment], layout: Layout
    ) -> tuple[NDArray[np.int32], Kept]:
        """The vector of one launch, and the tokens to keep for the sampler, as `pack` returns them."""
        if len(segments) < len(members) or not all([_is_increment(member) for member in members]):
            return pack(members, segments, self._rows, layout)
        earlier = self._earlier.get(members[0].row)
        if earlier is not None and _follow(members, layout, earlier):
            vector, kept = self._move_on(members, earlier)
            step = earlier.step
        else:
            vector, kept = pack(members, segments, self._rows, layout)
            step = layout.step(len(members))
        self._earlier[members[0].row] = PackedIncrements(layout, members, vector, kept, step)
        return vector, kept

    def _move_on(
        self, members: Sequence[Member], earlier: PackedIncrements
    ) -> tuple[NDArray[np.int32], Kept]:
        """The next launch, with one more token for each request of an earlier one."""
        layout = earlier.layout
        vector = earlier.vector + earlier.step
        if layout.has_moving_blocks or any([member.new_blocks for member in members]):
            used = len(members)
            view = layout.views(vector)
            row = np.array([member.row for member in members], np.int32)
            layout.write_blocks(view, self._rows.blocks, row, view["positions"][:used])
            if layout.has_states:
                segments = [Segment(index, 0, 1) for index in range(used)]
                view["source"][:used], view["target"][:used] = _states(members, segments)
        return vector, earlier.kept._replace(context_len=earlier.kept.context_len + 1)


def _is_increment(member: Member) -> bool:
    """True if a member is one token on the device, and draws another one."""
    return member.is_sampling and member.last_on_device and not member.ids and not member.targets


def _follow(members: Sequence[Member], layout: Layout, earlier: PackedIncrements) -> bool:
    """True if increments have the rows of earlier ones, and each request is a token further."""
    if layout is not earlier.layout or len(members) != len(earlier.members):
        return False
    for member, before in zip(members, earlier.members, strict=True):
        if member.row != before.row or member.start != before.start + 1:
            return False
        if member.sampling is not None:
            return False
    return True


def pack(
    members: Sequence[Member], segments: Sequence[Segment], rows: RowTable, layout: Layout
) -> tuple[NDArray[np.int32], Kept]:
    """Write one launch into a vector, without a Python loop over tokens, except over the scored ones.

    Returns:
        The vector, and the tokens to keep for the sampler.
    """
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    used = len(segments)
    index, offset, count = (
        np.fromiter(chain.from_iterable(segments), np.int32, 3 * used).reshape(used, 3).T
    )
    own = [members[each] for each in index.tolist()]
    row = np.array([member.row for member in own], np.int32)
    first = np.array([member.start for member in own], np.int32) + offset
    # from the segment on
    num_left = np.array([member.num_tokens for member in own], np.int32) - offset
    end = np.cumsum(count, dtype=np.int32)
    start = end - count
    total = int(end[-1])

    # Tokens.
    is_waiting = np.array([member.last_on_device for member in own]) & (count == num_left)
    waiting = end[is_waiting] - 1
    is_known = np.ones(total, bool)
    is_known[waiting] = False
    view["ids"][:total][is_known] = _ids(own, segments)
    view["on_device"][waiting] = 1
    view["token_row"][:total] = np.repeat(row, count)
    view["token_row"][total:] = layout.num_rows
    if layout.has_slots:
        view["slot"][:total] = np.repeat(rows.slot[row], count)
    view["positions"][:total] = np.arange(total, dtype=np.int32) + np.repeat(first - start, count)

    # Requests.
    view["query_start"][:used] = start
    view["query_len"][:used] = count
    view["context_len"][:used] = first + count
    layout.write_blocks(view, rows.blocks, row, first)
    if layout.has_states:
        view["source"][:used], view["target"][:used] = _states(own, segments)

    # Kept tokens.
    token, owner, targets = _kept(own, segments, count, num_left, end)
    view["kept_token"][: len(token)] = token
    is_drawn = np.array([target is None for target in targets], bool)
    request_row = row[owner]
    kept_row = np.where(is_drawn, request_row, np.int32(layout.num_rows))
    is_open = np.array([member.num_drafts > 0 for member in own])
    last_row = np.where(is_open[owner], np.int32(layout.num_rows), kept_row)
    context_len = view["positions"][token] + 1
    kept = Kept(index[owner].tolist(), targets, kept_row, last_row, context_len, request_row)
    if any([member.pools for member in own]):
        kept = kept._replace(
            pooled=_keep_pooled(own, segments, start.tolist(), view["kept_token"], len(token))
        )
    return vector, kept


def _states(own: Sequence[Member], segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """The blocks of states that segments read and write. A cut member reads its own result."""
    sources, targets = [], []
    for member, (_, offset, _) in zip(own, segments, strict=True):
        move = member.state
        assert move is not None, "the members of a model with states have blocks of states"
        sources.append(move.target if offset else move.source)
        targets.append(move.target)
    return sources, targets


def _keep_pooled(
    own: Sequence[Member],
    segments: Sequence[Segment],
    starts: Sequence[int],
    kept_token: NDArray[np.int32],
    place: int,
) -> list[PooledTokens]:
    """Keep the tokens for embeddings, from `place` on: the last ones of members, or all of those that are added up."""
    pooled = []
    for i, (member, (index, offset, size)) in enumerate(zip(own, segments, strict=True)):
        is_last = offset + size == member.num_tokens
        if member.pools is None or (member.pools == "last" and not is_last):
            continue
        count = 1 if member.pools == "last" else size
        kept_token[place : place + count] = np.arange(starts[i] + size - count, starts[i] + size)
        position = member.start + offset + size - count
        pooled.append(PooledTokens(index, place, count, position, is_last))
        place += count
    return pooled


def _kept(
    own: Sequence[Member],
    segments: Sequence[Segment],
    count: NDArray[np.int32],
    num_left: NDArray[np.int32],
    end: NDArray[np.int32],
) -> tuple[NDArray[np.integer], NDArray[np.integer], list[int | None]]:
    """Index, segment and target of each kept token of the batch.

    Tokens with targets are at the beginning of a segment. Those to sample after, the newest one of a member and its
    proposals, are at its end.

    Args:
        own: the member of each segment.
        segments: the parts of members.
        count: tokens of each segment.
        num_left: tokens of its member from its first one on.
        end: index after its last one in the batch.
    """
    num_drafts = np.array([member.num_drafts for member in own], np.int32)
    is_sampling = np.array([member.is_sampling for member in own])
    num_drawn = np.where(is_sampling, np.clip(count - num_left + 1 + num_drafts, 0, count), 0)
    scored = [
        member.targets[at : at + size] for member, (_, at, size) in zip(own, segments, strict=True)
    ]
    num_scored = np.array([len(each) for each in scored], np.int32)
    num_kept = num_scored + num_drawn
    owner = np.repeat(np.arange(len(own)), num_kept)
    # among those of its segment
    place = np.arange(len(owner)) - np.repeat(np.cumsum(num_kept) - num_kept, num_kept)
    token = place + np.where(
        place < num_scored[owner], (end - count)[owner], (end - num_kept)[owner]
    )
    targets: list[int | None] = []
    for each, number in zip(scored, num_drawn.tolist(), strict=True):
        targets += each
        targets += [None] * number
    return token, owner, targets


def _ids(own: Sequence[Member], segments: Sequence[Segment]) -> NDArray[np.int32]:
    """Ids known to the host, in the order of the batch."""
    parts = [
        member.ids if not offset and size >= len(member.ids) else member.ids[offset : offset + size]
        for member, (_, offset, size) in zip(own, segments, strict=True)
    ]
    return np.fromiter(chain.from_iterable(parts), np.int32)
