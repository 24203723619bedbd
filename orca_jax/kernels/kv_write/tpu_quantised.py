"""Write new tokens to quantised packed pages on a TPU, in Pallas (Mosaic): increments and chunks alike.

    HBM   kv pages [N, S, W]   updated in place, as are
          scales   [N, 1, 2K]  a line for each page
          new      [T', W]     the new tokens, not quantised yet
    SMEM  of each piece: its page, its first and last place there, and which of `new` belongs to place 0
    VMEM  of some pieces at a time: the new tokens, the line and the group before the first, the page, the new line

A piece is what one request writes to one page. A scale is that of the page's largest value, so the largest new value of
each head decides whether the page keeps its scale; what stood in it cannot be larger. Memory is written in groups of 32
tokens, tiles of a register of 8-bit values. Where a piece begins inside a group the tokens before it are read and kept;
what stands behind its last token belongs to nobody yet.

    for piece in pieces              the grid, as many as there are: dynamic
        ask for a later piece's tokens, group and line; wait for this one's
        the largest new value of each head, and the scales; where one has grown, ask for the groups before
        for group in the piece       tokens rotated to their places, quantised, and written
        for group before an earlier piece, where that has asked for them: quantised anew, and written

So an increment that is no larger than what its page has seen moves one group, whatever else stands in the page.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import PackedPages, largest_stored, scales_of
from orca_jax.kernels.kv_write.pieces import Pieces

_GROUP = 32  # tokens that pages are read and written by
_TILE = 16  # tokens that new ones are read by: whole tiles of bfloat16 and of float32
_SUBLANES = 8
_BUFFERS = 16 << 20  # bytes of VMEM for the buffers of several pieces
_VMEM_LIMIT = 48 << 20


def write_quantised(
    pages: PackedPages,
    new: Float[Array, "T W"],
    count: Int[Array, ""],
    pieces: Pieces,
    *,
    head_dim: int,
    interpret: Any = False,
) -> PackedPages:
    """The quantised pages with the new tokens of all requests; see `write_kv`.

    Args:
        pages: to be updated, of a kind that `refusal` of `kv_write_tpu` has nothing against.
        new: K and V of each token side by side as in a slot of a page, in bfloat16 or float32.
        count: how many pieces there are.
        pieces: what goes to which page, of `cut`.
        head_dim: D.
        interpret: as `pallas_call` takes it, to run without a TPU.
    """
    assert pages.scale is not None, "quantised pages have scales"
    size, width, line = pages.page_size, new.shape[1], pages.scale.shape[1:]
    new = jnp.pad(new, ((0, -new.shape[0] % _TILE), (0, 0)))
    slots = _slots((size + _TILE) * width * new.dtype.itemsize + (size + _GROUP + 8) * width)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    run = pl.pallas_call(
        partial(_kernel, head_dim=head_dim),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(count,),
            in_specs=[anywhere] * 3,
            out_specs=[anywhere] * 2,
            scratch_shapes=[
                pltpu.VMEM((slots, size + _TILE, width), new.dtype),
                pltpu.VMEM((slots, _GROUP, width), pages.dtype),
                pltpu.VMEM((slots, *line), jnp.float32),
                pltpu.VMEM((slots, size, width), pages.dtype),
                pltpu.VMEM((slots, *line), jnp.float32),
                *[pltpu.SemaphoreType.DMA((slots,))] * 6,
                pltpu.VMEM((size + _GROUP + _TILE, width), jnp.float32),
                pltpu.VMEM((slots, 2, width), jnp.float32),
                pltpu.SMEM((slots,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pages.kv, pages.scale)],
        input_output_aliases={7: 0, 8: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT),
        name="write_quantised",
        interpret=interpret,
    )
    return PackedPages(*run(count[None], *pieces, new, pages.kv, pages.scale))


def _slots(size: int) -> int:
    """Pieces that are on their way at once: an increment is short beside the time that a transfer takes to begin."""
    return max(2, min(4, _BUFFERS // size))


class _Transfers:
    """Of one piece at a time; slot `s` of each buffer belongs to every so many-th one."""

    def __init__(self, pieces: Pieces, arrays: tuple[Any, ...], buffers: tuple[Any, ...], first: Any) -> None:
        self.pieces = pieces
        self.new, self.kv, self.scale = arrays
        self.new_buf, self.old_buf, self.old_line, self.page_buf, self.new_line = buffers[:5]
        self.new_sem, self.old_sem, self.old_line_sem, self.page_sem, self.new_line_sem, self.before_sem = buffers[5:]
        self.first = first  # group that each slot's piece writes

    def tiles(self, piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) of `new` that a piece has tokens in."""
        token = self.pieces.token[piece]
        return (token + self.pieces.begin[piece]) // _TILE, pl.cdiv(token + self.pieces.end[piece], _TILE)

    def _tile(self, piece: jax.Array, slot: jax.Array, tile: jax.Array) -> Any:
        rows = pl.ds(_aligned(tile * _TILE, _TILE), _TILE)
        there = pl.ds(_aligned((tile - self.tiles(piece)[0]) * _TILE, _TILE), _TILE)
        return pltpu.make_async_copy(self.new.at[rows], self.new_buf.at[slot, there], self.new_sem.at[slot])

    def _old(self, piece: jax.Array, slot: jax.Array) -> list[Any]:
        """Of a page that has tokens: the group that the piece begins in, and the scales."""
        page = self.pieces.page_of(piece)
        group = self.kv.at[page, _places(self.pieces.begin[piece] // _GROUP)]
        return [
            pltpu.make_async_copy(group, self.old_buf.at[slot], self.old_sem.at[slot]),
            pltpu.make_async_copy(self.scale.at[page], self.old_line.at[slot], self.old_line_sem.at[slot]),
        ]

    def load(self, piece: jax.Array, slot: jax.Array) -> None:
        """Ask for what a piece begins with."""
        lax.fori_loop(*self.tiles(piece), lambda tile, _: self._tile(piece, slot, tile).start(), None)

        @pl.when(self.pieces.begin[piece] > 0)
        def old() -> None:
            for copy in self._old(piece, slot):
                copy.start()

    def loaded(self, piece: jax.Array, slot: jax.Array) -> None:
        """Wait for it."""
        lax.fori_loop(*self.tiles(piece), lambda tile, _: self._tile(piece, slot, tile).wait(), None)

        @pl.when(self.pieces.begin[piece] > 0)
        def old() -> None:
            for copy in self._old(piece, slot):
                copy.wait()

    def _before(self, piece: jax.Array, slot: jax.Array, index: jax.Array) -> Any:
        there = self.kv.at[self.pieces.page_of(piece), _places(index)]
        return pltpu.make_async_copy(there, self.page_buf.at[slot, _places(index)], self.before_sem.at[slot])

    def load_before(self, piece: jax.Array, slot: jax.Array) -> None:
        """Ask for the groups of a page that have to be written though the piece has no tokens there."""
        lax.fori_loop(*self.before(piece, slot), lambda index, _: self._before(piece, slot, index).start(), None)

    def loaded_before(self, piece: jax.Array, slot: jax.Array) -> None:
        """Wait for them: they come to where they are written from."""
        lax.fori_loop(*self.before(piece, slot), lambda index, _: self._before(piece, slot, index).wait(), None)

    def before(self, piece: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) of these groups; none where no scale has grown."""
        return self.first[slot], self.pieces.begin[piece] // _GROUP

    def store(self, piece: jax.Array, slot: jax.Array, index: jax.Array) -> Any:
        """The transfer of a finished group to its page."""
        there = self.kv.at[self.pieces.page_of(piece), _places(index)]
        return pltpu.make_async_copy(self.page_buf.at[slot, _places(index)], there, self.page_sem.at[slot])

    def store_line(self, piece: jax.Array, slot: jax.Array) -> Any:
        """The transfer of the new scales."""
        there = self.scale.at[self.pieces.page_of(piece)]
        return pltpu.make_async_copy(self.new_line.at[slot], there, self.new_line_sem.at[slot])

    def stored(self, piece: jax.Array, slot: jax.Array) -> None:
        """Wait until a piece is in its page."""
        groups = self.first[slot], pl.cdiv(self.pieces.end[piece], _GROUP)
        lax.fori_loop(*groups, lambda index, _: self.store(piece, slot, index).wait(), None)
        self.store_line(piece, slot).wait()


def _aligned(x: jax.Array, multiple: int) -> jax.Array:
    """The last multiple that is not larger."""
    return pl.multiple_of(x // multiple * multiple, multiple)


def _places(index: jax.Array) -> Any:
    """Of a group in its page."""
    return pl.ds(_aligned(index * _GROUP, _GROUP), _GROUP)


def _kernel(count: Any, *refs: Any, head_dim: int) -> None:
    """One piece, and what an earlier one has asked for."""
    pieces, (new, _, _, kv, scale) = Pieces(*refs[:5]), refs[5:10]
    buffers, (tokens, spread, first) = refs[10:21], refs[21:]
    transfers = _Transfers(pieces, (new, kv, scale), buffers, first)
    slots, piece = first.shape[0], pl.program_id(0)
    lag = slots // 2

    def of(piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        return piece, lax.rem(piece, slots)

    @pl.when(piece == 0)
    def begin() -> None:
        lax.fori_loop(0, jnp.minimum(slots - 1, count[0]), lambda i, _: transfers.load(i, i), None)

    pl.when(piece + slots - 1 < count[0])(lambda: transfers.load(*of(piece + slots - 1)))
    transfers.loaded(*of(piece))
    pl.when(piece >= slots)(lambda: transfers.stored(*of(piece - slots)))
    _write(transfers, tokens, spread, *of(piece), head_dim)
    pl.when(piece >= lag)(lambda: _write_before(transfers, spread, *of(piece - lag)))

    @pl.when(piece + 1 == count[0])
    def end() -> None:
        def last(pieces: int) -> tuple[jax.Array, jax.Array]:
            return jnp.maximum(count[0] - pieces, 0), count[0]

        lax.fori_loop(*last(lag), lambda i, _: _write_before(transfers, spread, *of(i)), None)
        lax.fori_loop(*last(slots), lambda i, _: transfers.stored(*of(i)), None)


def _write(transfers: _Transfers, tokens: Any, spread: Any, piece: jax.Array, slot: jax.Array, head_dim: int) -> None:
    """The scales of a piece, and the groups that it has tokens in; where a scale has grown, ask for those before."""
    begin, end = transfers.pieces.begin[piece], transfers.pieces.end[piece]
    largest = _of_heads(_read_tokens(transfers, tokens, piece, slot), head_dim)
    before = jnp.where(begin > 0, transfers.old_line[slot], 0.0)
    after = scales_of(largest, before, transfers.page_buf.dtype)
    transfers.new_line[slot] = after
    transfers.store_line(piece, slot).start()
    spread[slot] = _over_lanes(jnp.concatenate([before, after]), head_dim)
    has_grown = jnp.max(jnp.where(after > before, 1.0, 0.0)) > 0
    transfers.first[slot] = jnp.where(has_grown, 0, begin // _GROUP)
    transfers.load_before(piece, slot)

    def write(index: jax.Array, _: None) -> None:
        kept = transfers.old_buf[slot].astype(jnp.float32) * spread[slot, :1]
        moved = _at_places(tokens, index * _GROUP - begin + _lead(transfers, piece))
        place = index * _GROUP + lax.broadcasted_iota(jnp.int32, moved.shape, 0)
        _put(transfers, spread, piece, slot, index, jnp.where(place < begin, kept, moved))

    lax.fori_loop(begin // _GROUP, pl.cdiv(end, _GROUP), write, None)


def _write_before(transfers: _Transfers, spread: Any, piece: jax.Array, slot: jax.Array) -> None:
    """What a piece has asked for, by its new scales."""
    transfers.loaded_before(piece, slot)

    def write(index: jax.Array, _: None) -> None:
        values = transfers.page_buf[slot, _places(index)].astype(jnp.float32) * spread[slot, :1]
        _put(transfers, spread, piece, slot, index, values)

    lax.fori_loop(*transfers.before(piece, slot), write, None)


def _put(
    transfers: _Transfers, spread: Any, piece: jax.Array, slot: jax.Array, index: jax.Array, values: jax.Array
) -> None:
    """Quantise a group, and write it."""
    transfers.page_buf[slot, _places(index)] = _stored(values / spread[slot, 1:], transfers.page_buf.dtype)
    transfers.store(piece, slot, index).start()


def _lead(transfers: _Transfers, piece: jax.Array) -> jax.Array:
    """Tokens of others that were fetched before a piece's own."""
    return transfers.pieces.token[piece] + transfers.pieces.begin[piece] - transfers.tiles(piece)[0] * _TILE


def _read_tokens(transfers: _Transfers, tokens: Any, piece: jax.Array, slot: jax.Array) -> Float[Array, "8 W"]:
    """A piece's tokens in float32, since registers rotate no smaller ones, behind a group of anything; the largest."""
    pieces, (first, last) = transfers.pieces, transfers.tiles(piece)
    count = pieces.end[piece] - pieces.begin[piece]

    def of_tile(tile: jax.Array, found: jax.Array) -> jax.Array:
        values = transfers.new_buf[slot, pl.ds(_aligned(tile * _TILE, _TILE), _TILE)].astype(jnp.float32)
        tokens[pl.ds(_aligned(_GROUP + tile * _TILE, _TILE), _TILE)] = values
        index = tile * _TILE - _lead(transfers, piece) + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        values = jnp.where((index >= 0) & (index < count), jnp.abs(values), 0.0)
        return jnp.maximum(found, jnp.maximum(values[:_SUBLANES], values[_SUBLANES:]))

    nothing = jnp.zeros((_SUBLANES, tokens.shape[1]), jnp.float32)
    return lax.fori_loop(0, last - first, of_tile, nothing)


def _at_places(tokens: Any, first: jax.Array) -> Float[Array, "G W"]:
    """A group of tokens; `first` is the first one's index, which is negative where its place is another's."""
    base = _aligned(_GROUP + first, _SUBLANES)
    turns = _GROUP + first - base
    registers = tokens[pl.ds(base, _GROUP + _SUBLANES)].reshape(-1, _SUBLANES, tokens.shape[1])
    turned = pltpu.roll(registers, lax.rem(_SUBLANES - turns, _SUBLANES), 1)
    is_next = lax.broadcasted_iota(jnp.int32, turned[1:].shape, 1) >= _SUBLANES - turns
    return jnp.where(is_next, turned[1:], turned[:-1]).reshape(_GROUP, -1)


def _stored(values: Float[Array, "G W"], dtype: Any) -> Array:
    """As the pages have them."""
    limit = largest_stored(dtype)
    values = jnp.clip(values, -limit, limit)
    return (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)


def _of_heads(lanes: Float[Array, "8 W"], head_dim: int) -> Float[Array, "1 parts"]:
    """The largest of the lanes of each head's K and V."""
    shape = lanes.shape[0], lanes.shape[1] // head_dim
    index = lax.broadcasted_iota(jnp.int32, shape, 1)
    line = jnp.zeros(shape, jnp.float32)
    for i in range(shape[1]):
        largest = jnp.max(lanes[:, i * head_dim : (i + 1) * head_dim], axis=1, keepdims=True)
        line = jnp.where(index == i, largest, line)
    return jnp.max(line, axis=0, keepdims=True)


def _over_lanes(lines: Float[Array, "2 parts"], head_dim: int) -> Float[Array, "2 W"]:
    """What each head's K and V have, in all their lanes."""
    columns = [lines[:, i : i + 1] for i in range(lines.shape[1])]
    return jnp.concatenate([jnp.broadcast_to(column, (lines.shape[0], head_dim)) for column in columns], axis=1)
