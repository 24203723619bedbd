"""Write the latents of chunks to pages without values on a TPU, in Pallas (Mosaic).

    HBM   pages  [N, 1, D, S]  updated in place
          new    [D, T']       a column for each new token, with S tokens of padding before and after
    SMEM  of each piece: its page, its first and last slot there, and the index in `new` of slot 0
    VMEM  two buffers, each with the new columns and the page of one piece

A piece is the tokens of one request for one page. The page is read, and its columns from the first slot to the last are
replaced by those of the tokens, rotated to their lanes. While a piece is computed, the next one is read.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import HeadMajorPages
from orca_jax.kernels.kv_write.pieces import PagePieces

_LANES = 128


def write_latents(
    pages: HeadMajorPages,
    new: Float[Array, "T D"],
    count: Int[Array, ""],
    pieces: PagePieces,
    *,
    interpret: Any = False,
) -> HeadMajorPages:
    """Write the first `count` pieces of the new tokens.

    Args:
        pages: pages without values to update in place, not quantised; the page size is a multiple of 128.
        new: the latents of all tokens.
        count: number of pieces.
        pieces: result of `cut`.
        interpret: the argument of `pallas_call`, to run without a TPU.
    """
    _, _, dim, size = pages.k.shape
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    run = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            # zero programs must not run: most iterations have no pieces
            grid=(jnp.maximum(count, 1),),
            in_specs=[anywhere, anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((2, dim, size + _LANES), pages.k.dtype),
                pltpu.VMEM((2, dim, size), pages.k.dtype),
                *[pltpu.SemaphoreType.DMA((2,))] * 3,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pages.k.shape, pages.k.dtype),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="write_latents",
        interpret=interpret,
    )
    columns = new.astype(pages.k.dtype).T
    padded = jnp.pad(columns, ((0, 0), (size, -new.shape[0] % _LANES + size + _LANES)))
    # Not in a condition: XLA would copy all pages before it in some layers of a model with many.
    return pages._replace(k=run(count[None], *pieces, padded, pages.k))


def _kernel(count: Any, *refs: Any) -> None:
    """Write one piece, if there are any, and start to read the next."""
    piece = pl.program_id(0)
    pl.when(piece < count[0])(lambda: _write_piece(piece, count, *refs))


def _write_piece(piece: jax.Array, count: Any, *refs: Any) -> None:
    pieces = PagePieces(*refs[:5])
    new, _, pages, new_buf, page_buf, new_sem, page_sem, store_sem = refs[5:]
    size = page_buf.shape[2]
    buffer = lax.rem(piece, 2)
    other = 1 - buffer

    def first_column(piece: jax.Array) -> jax.Array:
        """The column of slot 0."""
        column: jax.Array = pieces.token[piece] + size
        return column

    def loads(piece: jax.Array, buffer: jax.Array) -> list[Any]:
        aligned = pl.multiple_of(first_column(piece) // _LANES * _LANES, _LANES)
        columns = new.at[:, pl.ds(aligned, size + _LANES)]
        page = pages.at[pieces.page_of(piece), 0]
        return [
            pltpu.make_async_copy(columns, new_buf.at[buffer], new_sem.at[buffer]),
            pltpu.make_async_copy(page, page_buf.at[buffer], page_sem.at[buffer]),
        ]

    def store(piece: jax.Array, buffer: jax.Array) -> Any:
        page = pages.at[pieces.page_of(piece), 0]
        return pltpu.make_async_copy(page_buf.at[buffer], page, store_sem.at[buffer])

    def load(piece: jax.Array, buffer: jax.Array) -> Callable[[], None]:
        def start() -> None:
            for copy in loads(piece, buffer):
                copy.start()

        return start

    pl.when(piece == 0)(load(piece, buffer))
    pl.when(piece >= 1)(lambda: store(piece - 1, other).wait())
    pl.when(piece + 1 < count[0])(load(piece + 1, other))
    for copy in loads(piece, buffer):
        copy.wait()
    shift = lax.rem(2 * _LANES - lax.rem(first_column(piece), _LANES), 2 * _LANES)
    for at in range(0, size, _LANES):
        # Registers rotate values of 32 bits only.
        two = new_buf[buffer, :, at : at + 2 * _LANES].astype(jnp.float32)
        moved = pltpu.roll(two, shift, 1)[:, :_LANES]
        slot = at + lax.broadcasted_iota(jnp.int32, moved.shape, 1)
        is_new = (slot >= pieces.begin[piece]) & (slot < pieces.end[piece])
        old = page_buf[buffer, :, at : at + _LANES].astype(jnp.float32)
        merged = jnp.where(is_new, moved, old).astype(page_buf.dtype)
        page_buf[buffer, :, at : at + _LANES] = merged
    store(piece, buffer).start()
    pl.when(piece + 1 == count[0])(lambda: store(piece, buffer).wait())
