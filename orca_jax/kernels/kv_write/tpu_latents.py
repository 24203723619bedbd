"""Write latents to pages without values on a TPU, in Pallas (Mosaic).

    HBM   pages  [N, 1, D, S]  updated in place, and scales [N, 1, S] of 8-bit pages
          new    [D, T']       a column for each new token, with S tokens of padding before and after; [1, T'] of scales
    SMEM  of each piece: its page, its first and last slot there, and the index in `new` of slot 0
    VMEM  two buffers, each with the new columns and the page of one piece

A piece is the tokens of one request for one page. The page is read, and its columns from the first slot to the last are
replaced by the tokens, rotated to their lanes. While a piece is computed, the next one is read.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from orca_jax.kernels.kv_pages import HeadMajorPages, stored_tokens
from orca_jax.kernels.kv_write.pieces import PagePieces

_LANES = 128


def write_latents(
    pages: HeadMajorPages,
    k: Float[Array, "T 1 D"],
    count: Int[Array, ""],
    pieces: PagePieces,
    *,
    interpret: Any = False,
) -> HeadMajorPages:
    """Write the first `count` pieces of the new tokens.

    Args:
        pages: pages without values to update in place; the page size is a multiple of 128.
        k: the latents of all tokens.
        count: number of pieces.
        pieces: result of `cut`.
        interpret: the argument of `pallas_call`, to run without a TPU.
    """
    size = pages.page_size
    pools, structure = jax.tree.flatten(pages)
    new = [_columns(tokens, size) for tokens in stored_tokens(pages, k, None)]
    blocks = [(*pool.shape[2:-1], size) if pool.ndim == 4 else (1, size) for pool in pools]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    types = [pool.dtype for pool in pools]
    run = pl.pallas_call(
        partial(_kernel, number=len(pools)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            # zero programs must not run: most iterations have no pieces
            grid=(jnp.maximum(count, 1),),
            in_specs=[anywhere] * (2 * len(pools)),
            out_specs=[anywhere] * len(pools),
            scratch_shapes=[
                *(
                    pltpu.VMEM((2, rows, size + _LANES), dtype)
                    for (rows, _), dtype in zip(blocks, types, strict=True)
                ),
                *(
                    pltpu.VMEM((2, *block), dtype)
                    for block, dtype in zip(blocks, types, strict=True)
                ),
                *[pltpu.SemaphoreType.DMA((2, len(pools)))] * 3,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={6 + len(pools) + index: index for index in range(len(pools))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="write_latents",
        interpret=interpret,
    )
    # Not in a condition: XLA would copy all pages before it in some layers of a model with many.
    return jax.tree.unflatten(structure, run(count[None], *pieces, *new, *pools))


def _columns(tokens: Num[Array, "T 1 *D"], size: int) -> Num[Array, "D1 T1"]:
    """The tokens as columns, with padding on both sides."""
    rows = tokens.reshape(tokens.shape[0], -1).T
    return jnp.pad(rows, ((0, 0), (size, -rows.shape[1] % _LANES + size + _LANES)))


def _kernel(count: Any, *refs: Any, number: int) -> None:
    """Write one piece, if there are any, and start to read the next."""
    piece = pl.program_id(0)
    pieces = PagePieces(*refs[:5])
    arrays = refs[5:]
    new, _, pools, new_bufs, page_bufs = (
        arrays[index * number : (index + 1) * number] for index in range(5)
    )
    moves = _Moves(pieces, new, pools, new_bufs, page_bufs, arrays[5 * number :])
    pl.when(piece < count[0])(lambda: moves.write_piece(piece, count[0]))


class _Moves:
    """The transfers of one piece at a time; pieces alternate between the two buffers."""

    def __init__(
        self,
        pieces: PagePieces,
        new: Sequence[Any],
        pools: Sequence[Any],
        new_bufs: Sequence[Any],
        page_bufs: Sequence[Any],
        semaphores: Sequence[Any],
    ) -> None:
        self.pieces = pieces
        self.new = new
        self.pools = pools
        self.new_bufs = new_bufs
        self.page_bufs = page_bufs
        self.new_sem, self.page_sem, self.store_sem = semaphores
        self.size = page_bufs[0].shape[2]

    def first_column(self, piece: jax.Array) -> jax.Array:
        """The column of slot 0."""
        column: jax.Array = self.pieces.token[piece] + self.size
        return column

    def _page(self, pool: Any, piece: jax.Array) -> Any:
        page = self.pieces.page_of(piece)
        return pool.at[page, 0] if pool.ndim == 4 else pool.at[page]

    def loads(self, piece: jax.Array, buffer: jax.Array) -> list[Any]:
        """The transfers of the new columns of a piece, and of its page."""
        aligned = pl.multiple_of(self.first_column(piece) // _LANES * _LANES, _LANES)
        copies = []
        for index, pool in enumerate(self.pools):
            columns = self.new[index].at[:, pl.ds(aligned, self.size + _LANES)]
            there = self.new_bufs[index].at[buffer]
            copies.append(pltpu.make_async_copy(columns, there, self.new_sem.at[buffer, index]))
            there = self.page_bufs[index].at[buffer]
            page = self._page(pool, piece)
            copies.append(pltpu.make_async_copy(page, there, self.page_sem.at[buffer, index]))
        return copies

    def stores(self, piece: jax.Array, buffer: jax.Array) -> list[Any]:
        """The transfers of a finished page."""
        return [
            pltpu.make_async_copy(
                self.page_bufs[index].at[buffer],
                self._page(pool, piece),
                self.store_sem.at[buffer, index],
            )
            for index, pool in enumerate(self.pools)
        ]

    def write_piece(self, piece: jax.Array, count: jax.Array) -> None:
        """Write a piece, and start to read the next."""
        buffer = lax.rem(piece, 2)
        other = 1 - buffer
        pl.when(piece == 0)(lambda: _start(self.loads(piece, buffer)))
        pl.when(piece >= 1)(lambda: _wait(self.stores(piece - 1, other)))
        pl.when(piece + 1 < count)(lambda: _start(self.loads(piece + 1, other)))
        _wait(self.loads(piece, buffer))
        for index in range(len(self.pools)):
            for at in range(0, self.size, _LANES):
                self._merge(index, piece, buffer, at)
        _start(self.stores(piece, buffer))
        pl.when(piece + 1 == count)(lambda: _wait(self.stores(piece, buffer)))

    def _merge(self, index: int, piece: jax.Array, buffer: jax.Array, at: int) -> None:
        """Replace the columns of a piece among 128 slots from `at` on."""
        page = self.page_bufs[index]
        # Registers rotate values of 32 bits only.
        wide = jnp.int32 if page.dtype == jnp.uint8 else jnp.float32
        two = self.new_bufs[index][buffer, :, at : at + 2 * _LANES].astype(wide)
        column = lax.rem(self.first_column(piece), _LANES)
        moved = pltpu.roll(two, lax.rem(2 * _LANES - column, 2 * _LANES), 1)[:, :_LANES]
        slot = at + lax.broadcasted_iota(jnp.int32, moved.shape, 1)
        is_new = (slot >= self.pieces.begin[piece]) & (slot < self.pieces.end[piece])
        old = page[buffer, :, at : at + _LANES].astype(wide)
        page[buffer, :, at : at + _LANES] = jnp.where(is_new, moved, old).astype(page.dtype)


def _start(copies: list[Any]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: list[Any]) -> None:
    for copy in copies:
        copy.wait()
