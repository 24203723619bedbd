"""Write the tokens of chunks to packed pages on a TPU, in Pallas (Mosaic).

    HBM   kv pages [N, S, W]   updated in place
          new      [T', W]     the new tokens as pages have them, with S tokens of padding before and behind
    SMEM  of each piece: its page, its first and last place there, and which of `new` belongs to place 0
    VMEM  the new tokens, the group before the first, and the page of two pieces

A piece is what one request writes to one page. Memory is written in whole groups, of 8 tokens in float32 and of 16 in
bfloat16: tiles of a register. Where a piece begins inside a group the tokens before it are read first and kept;
what stands behind its last token belongs to nobody yet.

    for piece in pieces           the grid, as many as there are: dynamic
        ask for the next piece's tokens, wait for this one's
        for group in its groups   rotated to their places, and written while the next group is made

XLA's scatter reads, changes and writes the group around each token: for a prompt it moves every group as many times as
that has tokens. Increments are written by their own attention kernel, or, where another attends, by the scatter.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, PackedPages, slots, tile_tokens
from orca_jax.kernels.kv_write.pieces import Pieces, cut
from orca_jax.kernels.kv_write.scatter import scatter
from orca_jax.kernels.kv_write.tpu_quantised import write_quantised

_VMEM_LIMIT = 48 << 20


def refusal(pages: KVPages) -> str | None:
    """Why this kernel or, where pages are quantised, that of `kv_write_tpu_quantised` cannot write them; or None."""
    if not isinstance(pages, PackedPages):
        return "write_kv 'tpu' writes packed pages"
    group = tile_tokens(pages.dtype)
    if pages.page_size % group:
        return f"write_kv 'tpu' needs a page_size that is a multiple of {group}, not {pages.page_size}"
    return None


def write_chunks(
    pages: PackedPages,
    new: Float[Array, "T W"],
    count: Int[Array, ""],
    pieces: Pieces,
    *,
    interpret: Any = False,
) -> PackedPages:
    """The pages with the new tokens of requests that have several; see `write_kv`.

    Args:
        pages: to be updated, of a kind that `refusal` has nothing against.
        new: K and V of each token as a slot of a page has them.
        count: how many pieces there are.
        pieces: what goes to which page, of `cut`.
        interpret: as `pallas_call` takes it, to run without a TPU.
    """
    size, group = pages.page_size, tile_tokens(pages.dtype)
    padded = jnp.pad(new, ((size, -new.shape[0] % group + size + group), (0, 0)))
    anywhere, width = pl.BlockSpec(memory_space=pl.ANY), new.shape[1]
    semaphores = pltpu.SemaphoreType.DMA((2,))
    run = pl.pallas_call(
        partial(_kernel, group=group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(count,),
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT),
        name="write_chunks",
        interpret=interpret,
    )
    return PackedPages(run(count[None], *pieces, padded, pages.kv))


class _Transfers:
    """Of one piece at a time; slot `s` of each buffer belongs to every second one."""

    def __init__(self, pieces: Pieces, arrays: tuple[Any, Any], buffers: tuple[Any, ...], group: int) -> None:
        self.pieces, self.group = pieces, group
        self.new, self.kv = arrays
        self.new_buf, self.old_buf, self.page_buf, self.new_sem, self.old_sem, self.page_sem = buffers

    def token(self, piece: jax.Array) -> jax.Array:
        """Which of the padded new tokens would go to place 0."""
        token: jax.Array = self.pieces.token[piece] + self.page_buf.shape[1]
        return token

    def _loads(self, piece: jax.Array, slot: jax.Array) -> list[Any]:
        def down(x: jax.Array) -> jax.Array:
            return pl.multiple_of(x // self.group * self.group, self.group)

        tokens = self.new.at[pl.ds(down(self.token(piece)), self.new_buf.shape[1])]
        before = self.kv.at[self.pieces.page_of(piece), pl.ds(down(self.pieces.begin[piece]), self.group)]
        return [
            pltpu.make_async_copy(tokens, self.new_buf.at[slot], self.new_sem.at[slot]),
            pltpu.make_async_copy(before, self.old_buf.at[slot], self.old_sem.at[slot]),
        ]

    def load(self, piece: jax.Array, slot: jax.Array) -> None:
        """Ask for a piece's new tokens, and for the group that it begins in."""
        for copy in self._loads(piece, slot):
            copy.start()

    def loaded(self, piece: jax.Array, slot: jax.Array) -> None:
        """Wait for them."""
        for copy in self._loads(piece, slot):
            copy.wait()

    def store(self, piece: jax.Array, slot: jax.Array, index: jax.Array) -> Any:
        """The transfer of a finished group to its page."""
        place = pl.ds(pl.multiple_of(index * self.group, self.group), self.group)
        there = self.kv.at[self.pieces.page_of(piece), place]
        return pltpu.make_async_copy(self.page_buf.at[slot, place], there, self.page_sem.at[slot])

    def groups(self, piece: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) of a piece."""
        return self.pieces.begin[piece] // self.group, pl.cdiv(self.pieces.end[piece], self.group)

    def stored(self, piece: jax.Array, slot: jax.Array) -> None:
        """Wait until a piece is in its page."""
        lax.fori_loop(*self.groups(piece), lambda index, _: self.store(piece, slot, index).wait(), None)


def _kernel(count: Any, *refs: Any, group: int) -> None:
    """One piece."""
    pieces, (new, _, kv), buffers = Pieces(*refs[:5]), refs[5:8], refs[8:]
    transfers = _Transfers(pieces, (new, kv), buffers, group)
    new_buf, old_buf, page_buf = buffers[:3]
    piece = pl.program_id(0)
    slot = lax.rem(piece, 2)
    pl.when(piece == 0)(lambda: transfers.load(piece, slot))
    pl.when(piece + 1 < count[0])(lambda: transfers.load(piece + 1, 1 - slot))
    transfers.loaded(piece, slot)
    pl.when(piece >= 2)(lambda: transfers.stored(piece - 2, slot))

    def write(index: jax.Array, _: None) -> None:
        at = pl.multiple_of(index * group, group)
        # Registers hold tokens of 32 bits, and rotate by those.
        two = new_buf[slot, pl.ds(at, 2 * group)].astype(jnp.float32)
        turns = lax.rem(2 * group - lax.rem(transfers.token(piece), group), 2 * group)
        moved = pltpu.roll(two, turns, 0)[:group]
        place = at + lax.broadcasted_iota(jnp.int32, moved.shape, 0)
        kept = old_buf[slot].astype(jnp.float32)
        page_buf[slot, pl.ds(at, group)] = jnp.where(place < pieces.begin[piece], kept, moved).astype(page_buf.dtype)
        transfers.store(piece, slot, index).start()

    lax.fori_loop(*transfers.groups(piece), write, None)

    @pl.when(piece + 1 == count[0])
    def end() -> None:
        pl.when(piece >= 1)(lambda: transfers.stored(piece - 1, 1 - slot))
        transfers.stored(piece, slot)


def write(
    pages: KVPages, k: Array, v: Array, page_table: Array, query_start: Array, query_len: Array, context_len: Array
) -> KVPages:
    """Write requests with one token by scatter, then chunks by the kernel. Quantised pages have one kernel for both.

    Requests with one token are the first rows, and have the first tokens.
    """
    if (reason := refusal(pages)) is not None:
        raise NotImplementedError(reason)
    assert isinstance(pages, PackedPages), "the only layout that is not refused"
    cut_pages = partial(cut, pages.page_size, k.shape[0], page_table, query_start)
    if pages.is_quantised:
        pieces = cut_pages(query_len, context_len)
        return write_quantised(pages, slots(k, v, k.dtype), *pieces, head_dim=k.shape[2])
    most = min(k.shape[0], query_len.shape[0])
    single = jnp.where(query_len == 1, query_len, 0)
    scattered = scatter(pages, k[:most], v[:most], page_table, query_start, single, context_len)
    if k.shape[0] == 1:
        return scattered
    assert isinstance(scattered, PackedPages), "as they were"
    pieces = cut_pages(jnp.where(query_len > 1, query_len, 0), context_len)
    return write_chunks(scattered, slots(k, v, pages.dtype), *pieces)
