"""Attention over latents on TPUs: pages without values, of one head that all queries share.

A page `[D, S]` is head major, so its tokens are in lanes. Pages of 128 tokens, or of a multiple, fill whole registers:
a page is one transfer without padding, and its keys need no transposition. With the page as it lies,

    scores  [M, S] = q [M, D] . page            a product for each page of a part
    values  [M, D] = weights [M, S] . page^T    from the same registers; M = the H queries of a token, or of several

The kernels of keys and values (`attention.py`) share their loop, transfers, plan and online softmax. A new token is a
column of its page, and the kernel of increments transfers the 128 columns around it back. The columns of chunks have a
kernel of their own (`kv_write/tpu_latents.py`), which also writes all tokens of 8-bit pages. Scales of 8-bit pages are
in lanes like their tokens, and multiply scores and weights.

The results have D channels, and a model takes the first ones, of its latents. The others cost a tenth of the products.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages
from orca_jax.kernels.kv_write.tpu_latents import write_latents
from orca_jax.kernels.ragged_attention.api import Scores
from orca_jax.kernels.ragged_attention.tpu.attention import AttentionCall
from orca_jax.kernels.ragged_attention.tpu.blocks import BlockSizes
from orca_jax.kernels.ragged_attention.tpu.chunks import Chunks
from orca_jax.kernels.ragged_attention.tpu.fetches import Step
from orca_jax.kernels.ragged_attention.tpu.increments import Increments, padded
from orca_jax.kernels.ragged_attention.tpu.plan import Prepared, blocks_for
from orca_jax.kernels.ragged_attention.tpu.shape import LANES, TpuShape
from orca_jax.kernels.ragged_attention.tpu.softmax import TpuSoftmax
from orca_jax.kernels.ragged_attention.tpu.walk import Part


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """The reason why the kernels cannot read these pages; None if they can."""
    if not isinstance(pages, HeadMajorPages) or pages.v is not None or pages.k.shape[1] != 1:
        return "attention 'tpu_latents' needs pages without values, of one head"
    if pages.page_size % LANES:
        return f"attention 'tpu_latents' needs a page_size that is a multiple of {LANES}, not {pages.page_size}"
    return None


def write_and_attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T 1 D"],
    v: None,
    pages: HeadMajorPages,
    prepared: Prepared,
    first_page: Int[Array, ""],
    scores: Scores,
    *,
    blocks: BlockSizes | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H D"], HeadMajorPages]:
    """Write the new latents of a layer and attend: increments are written by their kernel, while it attends."""
    own = prepared.of_layer(first_page)
    call = _LatentCall(q, pages, own, scores, blocks or blocks_for(q, pages), interpret)
    if pages.is_quantised:
        pages = write_latents(pages, k, own.num_pieces, own.pieces, interpret=interpret)
        out, pages = call.increments(pages, None)
    else:
        out, pages = call.increments(pages, k[:, 0].astype(pages.dtype))
        if q.shape[0] > 1:
            pages = write_latents(pages, k, own.num_pieces, own.pieces, interpret=interpret)
    return call.with_chunks(out, pages), pages


def _add(softmax: TpuSoftmax, q: jax.Array, part: Part, visible: jax.Array | None) -> None:
    """Add the pages of a part to the sums of the queries `q [M, D]`."""
    size = part.shape.page_size
    pages = [_read(part, page) for page in range(part.num_pages)]
    columns = ((1,), (0,)), ((), ())
    rows = ((1,), (1,)), ((), ())
    scores = jnp.concatenate([softmax.product(q, page, columns) for page in pages], axis=1)
    scales = _scales(part)
    if scales is not None:
        scores = scores * scales

    def weighted(weights: jax.Array) -> jax.Array:
        scaled = weights if scales is None else weights * scales
        scaled = scaled.astype(part.shape.compute_dtype)
        parts = (
            softmax.product(scaled[:, number * size : (number + 1) * size], page, rows)
            for number, page in enumerate(pages)
        )
        return sum(parts, start=jnp.zeros(()))

    softmax.add_scores(0, scores, visible, weighted)


def _read(part: Part, page: int) -> jax.Array:
    """A page of a part `[D, S]` in the type of products, not scaled."""
    stored = part.tokens[page]
    if stored.dtype == jnp.uint8:
        stored = pltpu.bitcast(stored, jnp.float8_e4m3fn)
    return stored.astype(part.shape.compute_dtype)


def _scales(part: Part) -> jax.Array | None:
    """The scales of the tokens of a part `[1, tokens]`; zeros for those that no query sees."""
    if part.scale is None:
        return None
    of_pages = [part.scale[part.first_page + page] for page in range(part.num_pages)]
    token = part.positions(1)
    is_seen = token < part.end
    if part.shape.has_window:
        is_seen &= token >= part.begin
    return jnp.where(is_seen, jnp.concatenate(of_pages, axis=1), 0.0)


class _LatentIncrements(Increments):
    """The work on rows with one query: M = H."""

    @staticmethod
    def lay_out(shape: TpuShape, new: Float[Array, "T D"]) -> tuple[jax.Array, pl.BlockSpec]:
        """The new tokens as columns, in blocks of 128."""
        blocks = LANES // shape.query_block

        def index_map(program: jax.Array, ends: Any, *_: Any) -> tuple[Any, Any]:
            return 0, (program + ends[0]) // blocks

        return padded(new, LANES).T, pl.BlockSpec((new.shape[1], LANES), index_map)

    def add_part(self, step: Step, part: Part) -> None:
        """Add a part to the sums of a row."""
        q = self.refs.q[step[1] - self.begin_of_block, 0]
        _add(self.sums(step[1]), q, part, self.visible(part, q.shape[0]))

    def insert(self, step: Step, buffer: jax.Array) -> None:
        """Put the new token, the last of the step, into its page, and start to write the columns around it."""
        shape = self.refs.pages.shape
        begin, end = self.refs.rows.visible(step[0], step[1])
        new = self.refs.new
        writing = self.refs.writing
        assert new is not None
        assert writing is not None
        fetched = step[2] * shape.fetch_tokens
        token = end - 1 - fetched
        slot = lax.rem(token, shape.page_size)
        lane = lax.rem(slot, LANES)
        columns = pl.ds(pl.multiple_of(slot - lane, LANES), LANES)
        tokens = self.refs.pages.kv_buf.at[buffer, token // shape.page_size, :, columns]
        old = tokens[...].astype(jnp.float32)
        shift = lax.rem(lane - step[1] % LANES + LANES, LANES)
        is_new = lax.broadcasted_iota(jnp.int32, old.shape, 1) == lane
        tokens[...] = jnp.where(is_new, pltpu.roll(new[...], shift, 1), old).astype(tokens.dtype)
        self.write(tokens, (writing[buffer], 0, slice(None), columns), buffer).start()
        if shape.has_window:
            # The tokens before the window are cleared next, but not in the pages.
            pl.when(begin - fetched > 0)(lambda: self.release(buffer))

    def tile_copy(self, buffer: jax.Array) -> Any:
        """A transfer of the size of the written columns, to wait for."""
        columns = pl.ds(0, LANES)
        tokens = self.refs.pages.kv_buf.at[buffer, 0, :, columns]
        return self.write(tokens, (jnp.int32(0), 0, slice(None), columns), buffer)


class _LatentChunks(Chunks):
    """The work on a block of tokens, with the H queries of a token adjacent."""

    def add_part(self, part: Part, visible: jax.Array | None) -> None:
        """Add a part to the sums of all queries."""
        _add(self.refs.softmax, self.refs.q[0], part, visible)


class _LatentCall(AttentionCall):
    """One call of both kernels."""

    of_increments = _LatentIncrements
    of_chunks = _LatentChunks
    refusal = staticmethod(refusal)


attend = _LatentCall.attend
attend_prepared = _LatentCall.attend_prepared
prepare = _LatentCall.prepare
