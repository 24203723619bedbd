"""Write new tokens to quantised token-major pages on a TPU, in Pallas (Mosaic): increments and chunks alike.

    HBM   kv pages [N, S, W]   updated in place
          scales   [N, 1, 2K]  of each page; updated in place
          new      [T', W]     the new tokens, not quantised yet
    SMEM  of each piece: its page, its first and last slot there, and the index in `new` of slot 0
    VMEM  buffers of up to four pieces: the new tokens, the old scales, the old group of the first slot, the page, the
          new scales

A piece is the tokens of one request for one page. A scale follows from the page's largest value. Old
values never exceed what their scale can represent, so the largest new value of each head decides whether the page keeps
its scale. Memory is written in groups of 32 tokens: register tiles of 8-bit values. If a piece begins inside a group,
the tokens before it are read and kept. The slots after its last token are not in use yet, so they may be overwritten.

    for piece in pieces              the grid; its length is dynamic
        start to read a later piece's tokens, old group and old scales; wait for this piece's
        compute the largest new value of each head, and the scales; if one has grown, start to read the groups before
        for group in the piece       tokens are rotated to their slots, quantised, and written
        for group before an earlier piece, if a scale has grown there: quantised again, and written

So an increment that fits the scales of its page moves one group, however full the page is.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import TokenMajorPages, largest_stored, scales_of
from orca_jax.kernels.kv_write.pieces import PagePieces

_GROUP = 32  # tokens in a group, the unit in which pages are read and written
# tokens in the unit in which `new` is read: whole register tiles of bfloat16 and of float32
_TILE = 16
_SUBLANES = 8
_BUFFER_BYTES = 16 << 20  # VMEM for the buffers of several pieces
_VMEM_LIMIT = 48 << 20


def write_quantised(
    pages: TokenMajorPages,
    new: Float[Array, "T W"],
    count: Int[Array, ""],
    pieces: PagePieces,
    *,
    head_dim: int,
    interpret: Any = False,
) -> TokenMajorPages:
    """Write the new tokens of all requests to quantised pages; see `write_kv`.

    Args:
        pages: pages to update in place; `refusal` of `kv_write/tpu.py` must accept them.
        new: K and V of each token in the layout of a slot, in bfloat16 or float32.
        count: number of pieces.
        pieces: result of `cut`.
        head_dim: D.
        interpret: the argument of `pallas_call`, to run without a TPU.

    Returns:
        The updated pages.
    """
    assert pages.scale is not None, "quantised pages have scales"
    size = pages.page_size
    width = new.shape[1]
    scales = pages.scale.shape[1:]
    new = jnp.pad(new, ((0, -new.shape[0] % _TILE), (0, 0)))
    buffers = _num_buffers(
        (size + _TILE) * width * new.dtype.itemsize + (size + _GROUP + 8) * width
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    run = pl.pallas_call(
        partial(_kernel, head_dim=head_dim),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(count,),
            in_specs=[anywhere] * 3,
            out_specs=[anywhere] * 2,
            scratch_shapes=[
                pltpu.VMEM((buffers, size + _TILE, width), new.dtype),
                pltpu.VMEM((buffers, _GROUP, width), pages.dtype),
                pltpu.VMEM((buffers, *scales), jnp.float32),
                pltpu.VMEM((buffers, size, width), pages.dtype),
                pltpu.VMEM((buffers, *scales), jnp.float32),
                *[pltpu.SemaphoreType.DMA((buffers,))] * 6,
                pltpu.VMEM((size + _GROUP + _TILE, width), jnp.float32),
                pltpu.VMEM((buffers, 2, width), jnp.float32),
                pltpu.SMEM((buffers,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (pages.kv, pages.scale)],
        input_output_aliases={7: 0, 8: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT
        ),
        name="write_quantised",
        interpret=interpret,
    )

    def write(pages: TokenMajorPages) -> TokenMajorPages:
        return TokenMajorPages(*run(count[None], *pieces, new, pages.kv, pages.scale))

    # A grid of zero programs must not run: an iteration of padding alone has no pieces.
    return lax.cond(count > 0, write, lambda pages: pages, pages)


def _num_buffers(size: int) -> int:
    """Number of buffers, each of `size` bytes: more than two, if they fit, hide the latency of small transfers."""
    return max(2, min(4, _BUFFER_BYTES // size))


class _QuantisedTransfers:
    """The transfers of one piece at a time; pieces take the buffers in turn."""

    def __init__(
        self, pieces: PagePieces, arrays: tuple[Any, ...], buffers: tuple[Any, ...], first: Any
    ) -> None:
        self.pieces = pieces
        self.new, self.kv, self.scale = arrays
        self.new_buf, self.old_buf, self.old_scale, self.page_buf, self.new_scale = buffers[:5]
        (
            self.new_sem,
            self.old_sem,
            self.old_scale_sem,
            self.page_sem,
            self.new_scale_sem,
            self.before_sem,
        ) = buffers[5:]
        self.first = first  # first group that the piece in each buffer writes

    def tiles(self, piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) tile of `new` with tokens of a piece."""
        token = self.pieces.token[piece]
        return (token + self.pieces.begin[piece]) // _TILE, pl.cdiv(
            token + self.pieces.end[piece], _TILE
        )

    def _tile(self, piece: jax.Array, buffer: jax.Array, tile: jax.Array) -> Any:
        rows = pl.ds(_aligned(tile * _TILE, _TILE), _TILE)
        there = pl.ds(_aligned((tile - self.tiles(piece)[0]) * _TILE, _TILE), _TILE)
        return pltpu.make_async_copy(
            self.new.at[rows], self.new_buf.at[buffer, there], self.new_sem.at[buffer]
        )

    def _old(self, piece: jax.Array, buffer: jax.Array) -> list[Any]:
        """The transfers from a page with old tokens: the group of the piece's first slot, and the scales."""
        page = self.pieces.page_of(piece)
        group = self.kv.at[page, _group_slots(self.pieces.begin[piece] // _GROUP)]
        return [
            pltpu.make_async_copy(group, self.old_buf.at[buffer], self.old_sem.at[buffer]),
            pltpu.make_async_copy(
                self.scale.at[page], self.old_scale.at[buffer], self.old_scale_sem.at[buffer]
            ),
        ]

    def load(self, piece: jax.Array, buffer: jax.Array) -> None:
        """Start to read a piece's new tokens and, if the page has old ones, the first slot's group and the scales."""
        lax.fori_loop(
            *self.tiles(piece), lambda tile, _: self._tile(piece, buffer, tile).start(), None
        )

        @pl.when(self.pieces.begin[piece] > 0)
        def old() -> None:
            for copy in self._old(piece, buffer):
                copy.start()

    def loaded(self, piece: jax.Array, buffer: jax.Array) -> None:
        """Wait for the transfers of `load`."""
        lax.fori_loop(
            *self.tiles(piece), lambda tile, _: self._tile(piece, buffer, tile).wait(), None
        )

        @pl.when(self.pieces.begin[piece] > 0)
        def old() -> None:
            for copy in self._old(piece, buffer):
                copy.wait()

    def _before(self, piece: jax.Array, buffer: jax.Array, index: jax.Array) -> Any:
        there = self.kv.at[self.pieces.page_of(piece), _group_slots(index)]
        return pltpu.make_async_copy(
            there, self.page_buf.at[buffer, _group_slots(index)], self.before_sem.at[buffer]
        )

    def load_before(self, piece: jax.Array, buffer: jax.Array) -> None:
        """Start to read the groups before a piece, to quantise them again."""
        lax.fori_loop(
            *self.before(piece, buffer),
            lambda index, _: self._before(piece, buffer, index).start(),
            None,
        )

    def loaded_before(self, piece: jax.Array, buffer: jax.Array) -> None:
        """Wait for these groups. They are read into `page_buf`, and written back from there."""
        lax.fori_loop(
            *self.before(piece, buffer),
            lambda index, _: self._before(piece, buffer, index).wait(),
            None,
        )

    def before(self, piece: jax.Array, buffer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) group before a piece to quantise again; none if no scale has grown."""
        return self.first[buffer], self.pieces.begin[piece] // _GROUP

    def store(self, piece: jax.Array, buffer: jax.Array, index: jax.Array) -> Any:
        """The transfer of a finished group to its page."""
        there = self.kv.at[self.pieces.page_of(piece), _group_slots(index)]
        return pltpu.make_async_copy(
            self.page_buf.at[buffer, _group_slots(index)], there, self.page_sem.at[buffer]
        )

    def store_scales(self, piece: jax.Array, buffer: jax.Array) -> Any:
        """The transfer of the new scales."""
        there = self.scale.at[self.pieces.page_of(piece)]
        return pltpu.make_async_copy(
            self.new_scale.at[buffer], there, self.new_scale_sem.at[buffer]
        )

    def stored(self, piece: jax.Array, buffer: jax.Array) -> None:
        """Wait until all groups of a piece and its scales are written."""
        groups = self.first[buffer], pl.cdiv(self.pieces.end[piece], _GROUP)
        lax.fori_loop(*groups, lambda index, _: self.store(piece, buffer, index).wait(), None)
        self.store_scales(piece, buffer).wait()


def _aligned(x: jax.Array, multiple: int) -> jax.Array:
    """Round down to a multiple."""
    return pl.multiple_of(x // multiple * multiple, multiple)


def _group_slots(index: jax.Array) -> Any:
    """The slots of a group in its page."""
    return pl.ds(_aligned(index * _GROUP, _GROUP), _GROUP)


def _kernel(count: Any, *refs: Any, head_dim: int) -> None:
    """Write one piece, and quantise again the groups before an earlier one."""
    pieces, (new, _, _, kv, scale) = PagePieces(*refs[:5]), refs[5:10]
    buffers, (tokens, spread, first) = refs[10:21], refs[21:]
    transfers = _QuantisedTransfers(pieces, (new, kv, scale), buffers, first)
    num_buffers = first.shape[0]
    piece = pl.program_id(0)
    lag = num_buffers // 2

    def of(piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        return piece, lax.rem(piece, num_buffers)

    @pl.when(piece == 0)
    def begin() -> None:
        lax.fori_loop(
            0, jnp.minimum(num_buffers - 1, count[0]), lambda i, _: transfers.load(i, i), None
        )

    pl.when(piece + num_buffers - 1 < count[0])(
        lambda: transfers.load(*of(piece + num_buffers - 1))
    )
    transfers.loaded(*of(piece))
    pl.when(piece >= num_buffers)(lambda: transfers.stored(*of(piece - num_buffers)))
    _write(transfers, tokens, spread, *of(piece), head_dim)
    pl.when(piece >= lag)(lambda: _write_before(transfers, spread, *of(piece - lag)))

    @pl.when(piece + 1 == count[0])
    def end() -> None:
        def last(pieces: int) -> tuple[jax.Array, jax.Array]:
            return jnp.maximum(count[0] - pieces, 0), count[0]

        lax.fori_loop(*last(lag), lambda i, _: _write_before(transfers, spread, *of(i)), None)
        lax.fori_loop(*last(num_buffers), lambda i, _: transfers.stored(*of(i)), None)


def _write(
    transfers: _QuantisedTransfers,
    tokens: Any,
    spread: Any,
    piece: jax.Array,
    buffer: jax.Array,
    head_dim: int,
) -> None:
    """Write the scales and groups of a piece; if a scale has grown, start to read the groups before it."""
    begin = transfers.pieces.begin[piece]
    end = transfers.pieces.end[piece]
    largest = _of_heads(_read_tokens(transfers, tokens, piece, buffer), head_dim)
    before = jnp.where(begin > 0, transfers.old_scale[buffer], 0.0)
    after = scales_of(largest, before, transfers.page_buf.dtype)
    transfers.new_scale[buffer] = after
    transfers.store_scales(piece, buffer).start()
    spread[buffer] = _over_lanes(jnp.concatenate([before, after]), head_dim)
    has_grown = jnp.max(jnp.where(after > before, 1.0, 0.0)) > 0
    transfers.first[buffer] = jnp.where(has_grown, 0, begin // _GROUP)
    transfers.load_before(piece, buffer)

    def write(index: jax.Array, _: None) -> None:
        kept = transfers.old_buf[buffer].astype(jnp.float32) * spread[buffer, :1]
        moved = _at_slots(tokens, index * _GROUP - begin + _lead(transfers, piece))
        slot = index * _GROUP + lax.broadcasted_iota(jnp.int32, moved.shape, 0)
        _put(transfers, spread, piece, buffer, index, jnp.where(slot < begin, kept, moved))

    lax.fori_loop(begin // _GROUP, pl.cdiv(end, _GROUP), write, None)


def _write_before(
    transfers: _QuantisedTransfers, spread: Any, piece: jax.Array, buffer: jax.Array
) -> None:
    """Quantise the groups before a piece again with its new scales, and write them."""
    transfers.loaded_before(piece, buffer)

    def write(index: jax.Array, _: None) -> None:
        values = (
            transfers.page_buf[buffer, _group_slots(index)].astype(jnp.float32) * spread[buffer, :1]
        )
        _put(transfers, spread, piece, buffer, index, values)

    lax.fori_loop(*transfers.before(piece, buffer), write, None)


def _put(
    transfers: _QuantisedTransfers,
    spread: Any,
    piece: jax.Array,
    buffer: jax.Array,
    index: jax.Array,
    values: jax.Array,
) -> None:
    """Quantise a group, and write it."""
    transfers.page_buf[buffer, _group_slots(index)] = _stored(
        values / spread[buffer, 1:], transfers.page_buf.dtype
    )
    transfers.store(piece, buffer, index).start()


def _lead(transfers: _QuantisedTransfers, piece: jax.Array) -> jax.Array:
    """Number of other pieces' tokens read before the piece's own."""
    return (
        transfers.pieces.token[piece]
        + transfers.pieces.begin[piece]
        - transfers.tiles(piece)[0] * _TILE
    )


def _read_tokens(
    transfers: _QuantisedTransfers, tokens: Any, piece: jax.Array, buffer: jax.Array
) -> Float[Array, "8 W"]:
    """Copy a piece's tokens to `tokens` in float32, after an undefined group, and return their largest magnitudes.

    Registers rotate values of 32 bits only.
    """
    pieces, (first, last) = transfers.pieces, transfers.tiles(piece)
    count = pieces.end[piece] - pieces.begin[piece]

    def of_tile(tile: jax.Array, found: jax.Array) -> jax.Array:
        values = transfers.new_buf[buffer, pl.ds(_aligned(tile * _TILE, _TILE), _TILE)].astype(
            jnp.float32
        )
        tokens[pl.ds(_aligned(_GROUP + tile * _TILE, _TILE), _TILE)] = values
        index = (
            tile * _TILE
            - _lead(transfers, piece)
            + lax.broadcasted_iota(jnp.int32, values.shape, 0)
        )
        values = jnp.where((index >= 0) & (index < count), jnp.abs(values), 0.0)
        return jnp.maximum(found, jnp.maximum(values[:_SUBLANES], values[_SUBLANES:]))

    nothing = jnp.zeros((_SUBLANES, tokens.shape[1]), jnp.float32)
    return lax.fori_loop(0, last - first, of_tile, nothing)


def _at_slots(tokens: Any, first: jax.Array) -> Float[Array, "G W"]:
    """Rotate a group of tokens to their slots.

    `first` is the index of the token for the group's first slot; it is negative if that slot holds an old token.
    """
    base = _aligned(_GROUP + first, _SUBLANES)
    turns = _GROUP + first - base
    registers = tokens[pl.ds(base, _GROUP + _SUBLANES)].reshape(-1, _SUBLANES, tokens.shape[1])
    turned = pltpu.roll(registers, lax.rem(_SUBLANES - turns, _SUBLANES), 1)
    is_next = lax.broadcasted_iota(jnp.int32, turned[1:].shape, 1) >= _SUBLANES - turns
    return jnp.where(is_next, turned[1:], turned[:-1]).reshape(_GROUP, -1)


def _stored(values: Float[Array, "G W"], dtype: Any) -> Array:
    """Clip and round values to the type of the pages."""
    limit = largest_stored(dtype)
    values = jnp.clip(values, -limit, limit)
    return (jnp.round(values) if jnp.issubdtype(dtype, jnp.integer) else values).astype(dtype)


def _of_heads(lanes: Float[Array, "8 W"], head_dim: int) -> Float[Array, "1 parts"]:
    """The largest value over the lanes of each head's K and V."""
    shape = lanes.shape[0], lanes.shape[1] // head_dim
    index = lax.broadcasted_iota(jnp.int32, shape, 1)
    line = jnp.zeros(shape, jnp.float32)
    for i in range(shape[1]):
        largest = jnp.max(lanes[:, i * head_dim : (i + 1) * head_dim], axis=1, keepdims=True)
        line = jnp.where(index == i, largest, line)
    return jnp.max(line, axis=0, keepdims=True)


def _over_lanes(lines: Float[Array, "2 parts"], head_dim: int) -> Float[Array, "2 W"]:
    """Repeat the value of each head's K and V in all their lanes."""
    columns = [lines[:, i : i + 1] for i in range(lines.shape[1])]
    return jnp.concatenate(
        [jnp.broadcast_to(column, (lines.shape[0], head_dim)) for column in columns], axis=1
    )
