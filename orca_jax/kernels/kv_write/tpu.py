"""Write the tokens of chunks to token-major pages on a TPU, in Pallas (Mosaic).

    HBM   kv pages [N, S, W]   updated in place
          new      [T', W]     the new tokens in the layout of a slot, with S tokens of padding before and after
    SMEM  of each piece: its page, its first and last slot there, and the index in `new` of slot 0
    VMEM  two buffers, each with the new tokens, the old group of the first slot, and the page of one piece

A piece is the tokens of one request for one page. Memory is written in whole groups: register tiles of 8 tokens
in float32 and of 16 in bfloat16. If a piece begins inside a group, the tokens before it are read first and kept. The
slots after its last token are not in use yet, so they may be overwritten.

    for piece in pieces           the grid; its length is dynamic
        start to read the next piece's tokens, wait for this piece's
        for group in its groups   tokens are rotated to their slots, and written while the next group is computed

XLA's scatter reads, changes and writes the group around each token: for a prompt it moves every group once for each of
its tokens. Increments are written by their attention kernel or, with another attention, by the scatter.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import (
    KVPages,
    RowArrays,
    TokenMajorPages,
    lack_of_tiles,
    slots,
    tile_tokens,
)
from orca_jax.kernels.kv_write import scatter
from orca_jax.kernels.kv_write.pieces import PagePieces, cut
from orca_jax.kernels.kv_write.tpu_quantised import write_quantised

_VMEM_LIMIT = 48 << 20


def refusal(pages: KVPages) -> str | None:
    """The reason why the TPU kernels cannot write these pages, quantised or not; None if they can."""
    return lack_of_tiles(pages)


def write_chunks(
    pages: TokenMajorPages,
    new: Float[Array, "T W"],
    count: Int[Array, ""],
    pieces: PagePieces,
    *,
    interpret: Any = False,
) -> TokenMajorPages:
    """Write the new tokens of requests with several; see `write_kv`.

    Args:
        pages: pages to update in place; `refusal` must accept them.
        new: K and V of each token, in the layout of a slot.
        count: number of pieces.
        pieces: result of `cut`.
        interpret: the argument of `pallas_call`, to run without a TPU.

    Returns:
        The updated pages.
    """
    size = pages.page_size
    group = tile_tokens(pages.dtype)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    width = new.shape[1]
    semaphores = pltpu.SemaphoreType.DMA((2,))
    run = pl.pallas_call(
        partial(_kernel, group=group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            # zero programs must not run: most iterations have no pieces
            grid=(jnp.maximum(count, 1),),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((2, size + group, width), pages.dtype),
                pltpu.VMEM((2, group, width), pages.dtype),
                pltpu.VMEM((2, size, width), pages.dtype),
                *[semaphores] * 3,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.kv.shape, pages.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT
        ),
        name="write_chunks",
        interpret=interpret,
    )

    padded = jnp.pad(new, ((size, -new.shape[0] % group + size + group), (0, 0)))
    # Not in a condition: XLA would copy all pages before it in some layers of a model with many.
    return TokenMajorPages(run(count[None], *pieces, padded, pages.kv))


class _ChunkTransfers:
    """The transfers of one piece at a time; pieces alternate between the two buffers."""

    def __init__(
        self, pieces: PagePieces, arrays: tuple[Any, Any], buffers: tuple[Any, ...], group: int
    ) -> None:
        self.pieces = pieces
        self.group = group
        self.new, self.kv = arrays
        self.new_buf, self.old_buf, self.page_buf, self.new_sem, self.old_sem, self.page_sem = (
            buffers
        )

    def token(self, piece: jax.Array) -> jax.Array:
        """Index, in the padded new tokens, of the token for slot 0."""
        token: jax.Array = self.pieces.token[piece] + self.page_buf.shape[1]
        return token

    def _loads(self, piece: jax.Array, buffer: jax.Array) -> list[Any]:
        def down(x: jax.Array) -> jax.Array:
            return pl.multiple_of(x // self.group * self.group, self.group)

        tokens = self.new.at[pl.ds(down(self.token(piece)), self.new_buf.shape[1])]
        before = self.kv.at[
            self.pieces.page_of(piece), pl.ds(down(self.pieces.begin[piece]), self.group)
        ]
        return [
            pltpu.make_async_copy(tokens, self.new_buf.at[buffer], self.new_sem.at[buffer]),
            pltpu.make_async_copy(before, self.old_buf.at[buffer], self.old_sem.at[buffer]),
        ]

    def load(self, piece: jax.Array, buffer: jax.Array) -> None:
        """Start to read the new tokens of a piece, and the old group of its first slot."""
        for copy in self._loads(piece, buffer):
            copy.start()

    def loaded(self, piece: jax.Array, buffer: jax.Array) -> None:
        """Wait for the transfers of `load`."""
        for copy in self._loads(piece, buffer):
            copy.wait()

    def store(self, piece: jax.Array, buffer: jax.Array, index: jax.Array) -> Any:
        """The transfer of a finished group to its page."""
        slots = pl.ds(pl.multiple_of(index * self.group, self.group), self.group)
        there = self.kv.at[self.pieces.page_of(piece), slots]
        return pltpu.make_async_copy(
            self.page_buf.at[buffer, slots], there, self.page_sem.at[buffer]
        )

    def groups(self, piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) group of a piece."""
        return self.pieces.begin[piece] // self.group, pl.cdiv(self.pieces.end[piece], self.group)

    def stored(self, piece: jax.Array, buffer: jax.Array) -> None:
        """Wait until all groups of a piece are written."""
        lax.fori_loop(
            *self.groups(piece), lambda index, _: self.store(piece, buffer, index).wait(), None
        )


def _kernel(count: Any, *refs: Any, group: int) -> None:
    """Write one piece, if there are any, and start to read the next."""
    piece = pl.program_id(0)
    pl.when(count[0] > 0)(lambda: _write_piece(piece, count, *refs, group=group))


def _write_piece(piece: jax.Array, count: Any, *refs: Any, group: int) -> None:
    pieces, (new, _, kv), buffers = PagePieces(*refs[:5]), refs[5:8], refs[8:]
    transfers = _ChunkTransfers(pieces, (new, kv), buffers, group)
    new_buf, old_buf, page_buf = buffers[:3]
    buffer = lax.rem(piece, 2)
    pl.when(piece == 0)(lambda: transfers.load(piece, buffer))
    pl.when(piece + 1 < count[0])(lambda: transfers.load(piece + 1, 1 - buffer))
    transfers.loaded(piece, buffer)
    pl.when(piece >= 2)(lambda: transfers.stored(piece - 2, buffer))

    def write(index: jax.Array, _: None) -> None:
        at = pl.multiple_of(index * group, group)
        # Registers rotate values of 32 bits only.
        two = new_buf[buffer, pl.ds(at, 2 * group)].astype(jnp.float32)
        turns = lax.rem(2 * group - lax.rem(transfers.token(piece), group), 2 * group)
        moved = pltpu.roll(two, turns, 0)[:group]
        slot = at + lax.broadcasted_iota(jnp.int32, moved.shape, 0)
        kept = old_buf[buffer].astype(jnp.float32)
        page_buf[buffer, pl.ds(at, group)] = jnp.where(
            slot < pieces.begin[piece], kept, moved
        ).astype(page_buf.dtype)
        transfers.store(piece, buffer, index).start()

    lax.fori_loop(*transfers.groups(piece), write, None)

    @pl.when(piece + 1 == count[0])
    def end() -> None:
        pl.when(piece >= 1)(lambda: transfers.stored(piece - 1, 1 - buffer))
        transfers.stored(piece, buffer)


def write(pages: KVPages, k: Array, v: Array, requests: RowArrays) -> KVPages:
    """Scatter increments (the first rows and tokens), write chunks by a kernel. Quantised pages have one for both."""
    assert isinstance(pages, TokenMajorPages), "refusal accepts token-major pages only"
    num_tokens = k.shape[0]
    query_len = requests.query_len
    if pages.is_quantised:
        pieces = cut(pages.page_size, num_tokens, requests)
        return write_quantised(pages, slots(k, v, k.dtype), *pieces, head_dim=k.shape[2])
    most = min(num_tokens, query_len.shape[0])
    increments = requests._replace(query_len=jnp.where(query_len == 1, query_len, 0))
    scattered = scatter.write(pages, k[:most], v[:most], increments)
    if num_tokens == 1:
        return scattered
    assert isinstance(scattered, TokenMajorPages), "scatter keeps the layout"
    chunks = requests._replace(query_len=jnp.where(query_len > 1, query_len, 0))
    return write_chunks(
        scattered, slots(k, v, pages.dtype), *cut(pages.page_size, num_tokens, chunks)
    )
