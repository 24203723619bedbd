"""Attention of increments on TPUs (rows with one query); the kernel can also write their new K and V.

    HBM   pages and page lists, as in `walk.py`
    VMEM  of eight rows: queries [8, B, M, X], outputs of the same shape, new tokens [8, W]

Increments have G queries for each KV head, but a matrix unit takes eight rows at once. So several KV heads are
multiplied together, in a bundle: enough heads for M = 8 rows, and for lanes X that fill whole registers. There are B
bundles. The queries of a head are zero in the lanes of the other heads and, if D is not a multiple of 128, in the lanes
of V. This costs nothing: the matrix unit loads the same tiles of keys, and the other rows would be padding.

    for eight rows                 a block; the grid, as long as there are increments
        for row in them            its sums begin here; those of a block end together
            for part of its pages  scores of [M, tokens] for each bundle

The new token of a row belongs in the row's last page. That page is fetched anyway, so the kernel puts the token into
the fetched page and attends to it there. Meanwhile the tile of tokens around it is transferred back to the page. No
other request reads that page, because requests share only full pages. Pages of 8 bits are written by another kernel
before this one, since a new token may change the scale of its page.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from orca_jax.kernels.kv_pages import KVPages
from orca_jax.kernels.ragged_attention.tpu.fetches import Ref, Step
from orca_jax.kernels.ragged_attention.tpu.launch import launch
from orca_jax.kernels.ragged_attention.tpu.plan import Prepared
from orca_jax.kernels.ragged_attention.tpu.shape import LANES, TpuShape
from orca_jax.kernels.ragged_attention.tpu.softmax import TpuSoftmax
from orca_jax.kernels.ragged_attention.tpu.walk import Kernel, Part, Refs, part_of, walk

_NONE = -1  # no page


def attend_increments[P: KVPages](
    shape: TpuShape,
    q: Float[Array, "T H D"],
    pages: P,
    prepared: Prepared,
    *,
    new: Float[Array, "T W"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    work: "type[Increments] | None" = None,
    **options: Any,
) -> tuple[Float[Array, "T H D"], P]:
    """Compute the outputs of the increments, and write their new tokens if `new` is given.

    Increments are the first rows, and their tokens are the first tokens.

    Args:
        shape: the constants of the kernel; `query_block` is the number of rows in a block.
        q: queries, scaled.
        pages: the KV cache.
        prepared: the requests.
        new: K and V of each token in the layout of a slot and the type of the pages; None if the pages hold them.
        sinks: those of `Scores`, scaled as the queries.
        work: the work of the kernel; None for keys and values.
        options: other arguments of `launch`.

    Returns:
        Outputs `[T, H, D]`, meaningless for other rows, and the pages.
    """
    most = min(q.shape[0], prepared.start.shape[0])
    work = work or Increments
    queries = padded(_bundle(shape, q[:most]), shape.query_block)
    if new is not None:
        options["new"] = work.lay_out(shape, new[:most].astype(jnp.float32))
    if sinks is not None:
        by_head = sinks.reshape(shape.num_kv_heads, shape.groups)
        by_head = jnp.pad(by_head, ((0, -shape.num_kv_heads % shape.bundle_heads), (0, 0)))
        bundles = by_head.reshape(-1, shape.bundle_heads * shape.groups)
        options["sinks"] = jnp.broadcast_to(bundles[..., None], (*bundles.shape, LANES))
    out, pages = launch(
        partial(_kernel, work),
        "increments",
        shape,
        prepared.increments,
        queries,
        pages,
        prepared,
        axis=0,
        **options,
    )
    return jnp.pad(_unbundle(shape, out)[:most], ((0, q.shape[0] - most), (0, 0), (0, 0))), pages


def _kernel(work: "type[Increments]", refs: Refs) -> None:
    walk(
        refs,
        work(refs, (pl.program_id(0) + refs.rows.first_block) * refs.pages.shape.query_block),
    )
    refs.out[...] = refs.softmax.result().astype(refs.out.dtype)


@dataclass(frozen=True)
class Increments(Kernel):
    """The work on rows with one query; each row has its own sums `[B, M, X]`, M = bundle_heads * G."""

    refs: Refs
    begin_of_block: jax.Array

    @staticmethod
    def lay_out(shape: TpuShape, new: Float[Array, "T W"]) -> tuple[jax.Array, pl.BlockSpec]:
        """The new tokens as an input of the kernel. With 32-bit values, each token is a sublane of its own."""
        block = shape.query_block, new.shape[1]
        spec = pl.BlockSpec(block, lambda program, ends, *_: (program + ends[0], 0))
        return padded(new, shape.query_block), spec

    def begin(self) -> None:
        if (writing := self.refs.writing) is not None:
            for buffer in range(self.refs.pages.shape.buffers):
                writing[buffer] = _NONE

    def begin_row(self, row: jax.Array) -> None:
        self.sums(row).clear()

    def sums(self, row: jax.Array) -> TpuSoftmax:
        """The sums of a row."""
        return self.refs.softmax.of_row(row - self.begin_of_block)

    def visit(self, step: Step, buffer: jax.Array) -> None:
        pages = self.refs.pages
        lower, upper = self.refs.rows.tokens(step)
        size = pages.shape.compute_tokens
        if (writing := self.refs.writing) is not None:
            pl.when(writing[buffer] != _NONE)(lambda: self.insert(step, buffer))
        pages.clear_passed(step, buffer)

        def one(index: jax.Array, _: None) -> None:
            self.add_part(step, part_of(pages, step, buffer, index, pages.shape.compute_pages))

        lax.fori_loop(lower // size, pl.cdiv(upper, size), one, None)

    def add_part(self, step: Step, part: Part) -> None:
        """Add a part to the sums of all bundles."""
        shape = part.shape
        sums = self.sums(step[1])
        queries = self.refs.q.at[step[1] - self.begin_of_block]
        visible = self.visible(part, queries.shape[1])
        for index, bundle in enumerate(shape.bundles):
            k_lanes, v_lanes = shape.kv_lanes(*bundle)
            k = part.stored(k_lanes)
            v = k if v_lanes == k_lanes else part.stored(v_lanes)
            sums.add_tokens(
                index, queries[index, :, : k.shape[1]], k, v, visible, self._scales(part, bundle)
            )

    def visible(self, part: Part, num_queries: int) -> jax.Array:
        """Mask of the tokens of a part that the queries of a row see."""
        position = part.positions(num_queries)
        visible = position < part.end
        if part.shape.has_window:
            visible &= position >= part.end - self.refs.rows.window[0]
        return visible

    def _scales(self, part: Part, bundle: tuple[int, int]) -> tuple[jax.Array, jax.Array] | None:
        """Scales of K and of V, to apply to scores and weights: these are fewer than keys and values."""
        if not part.shape.is_quantised:
            return None
        lane, heads = bundle
        first_head = lane // (2 * part.shape.head_dim)
        return part.scales(first_head, heads, 0), part.scales(first_head, heads, 1)

    def prepare(self, step: Step, buffer: jax.Array) -> None:
        if (writing := self.refs.writing) is None:
            return
        shape = self.refs.pages.shape
        pages = self.refs.pages
        index = (self.refs.rows.context[step[1]] - 1) // shape.page_size - step[
            2
        ] * shape.fetch_pages
        is_here = index < shape.fetch_pages
        page = pages.page(step, jnp.minimum(index, shape.fetch_pages - 1), buffer)
        writing[buffer] = jnp.where(is_here, page, _NONE)

    def release(self, buffer: jax.Array) -> None:
        if (writing := self.refs.writing) is None:
            return

        @pl.when(writing[buffer] != _NONE)
        def wait() -> None:
            self.tile_copy(buffer).wait()
            writing[buffer] = _NONE

    def tile_copy(self, buffer: jax.Array) -> Any:
        """A transfer of the size of a written tile, to wait for."""
        anywhere = pl.ds(0, self.refs.pages.shape.tile_tokens)
        tokens = self.refs.pages.kv_buf.at[buffer, anywhere]
        return self.write(tokens, (jnp.int32(0), anywhere), buffer)

    def insert(self, step: Step, buffer: jax.Array) -> None:
        """Put the new token, the last of the step, into the fetched page, and start to write the tile around it."""
        shape = self.refs.pages.shape
        begin, end = self.refs.rows.visible(step[0], step[1])
        new = self.refs.new
        writing = self.refs.writing
        assert new is not None
        assert writing is not None
        fetched = step[2] * shape.fetch_tokens
        token = end - 1 - fetched
        first = pl.multiple_of(token // shape.tile_tokens * shape.tile_tokens, shape.tile_tokens)
        tokens = self.refs.pages.kv_buf.at[buffer, pl.ds(first, shape.tile_tokens)]
        old = tokens[...].astype(jnp.float32)
        is_new = lax.broadcasted_iota(jnp.int32, old.shape, 0) == token - first
        values = new[pl.ds(step[1] - self.begin_of_block, 1)]
        tokens[...] = jnp.where(is_new, jnp.broadcast_to(values, old.shape), old).astype(
            tokens.dtype
        )
        there = pl.ds(
            pl.multiple_of(lax.rem(first, shape.page_size), shape.tile_tokens), shape.tile_tokens
        )
        self.write(tokens, (writing[buffer], there), buffer).start()
        if shape.has_window:
            # The tokens before the window are cleared next, but not in the pages.
            pl.when(begin - fetched > first)(lambda: self.release(buffer))

    def write(self, tokens: Ref, place: tuple[Any, ...], buffer: jax.Array) -> Any:
        """The transfer of a tile of tokens to its place in the pages."""
        assert self.refs.write_sem is not None
        return pltpu.make_async_copy(
            tokens, self.refs.pages.kv.at[place], self.refs.write_sem.at[buffer]
        )


def _bundle(shape: TpuShape, q: Float[Array, "T H D"]) -> Float[Array, "T B M X"]:
    """Lay out queries in bundles: each in the lanes of its KV head, with zeros in the other lanes of the bundle."""
    n = shape.bundle_heads
    missing = -shape.num_kv_heads % shape.bundle_heads
    by_head = q.reshape(q.shape[0], shape.num_kv_heads, shape.groups, shape.head_dim)
    by_head = jnp.pad(by_head, ((0, 0), (0, missing), (0, 0), (0, shape.lanes - shape.head_dim)))
    bundles = by_head.reshape(q.shape[0], -1, n, shape.groups, 1, shape.lanes)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    spread = jnp.where(own, bundles, jnp.zeros_like(bundles))
    return spread.reshape(q.shape[0], bundles.shape[1], n * shape.groups, n * shape.lanes)


def _unbundle(shape: TpuShape, out: Float[Array, "T B M X"]) -> Float[Array, "T H D"]:
    """Select the outputs of each head: the values of its own KV head."""
    n = shape.bundle_heads
    split = out.reshape(*out.shape[:2], n, shape.groups, n, shape.lanes)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    # Not a product with 0 and 1: lanes past the last bundle's heads were never computed.
    values = jnp.where(own, split, jnp.zeros_like(split)).sum(axis=4)[..., -shape.head_dim :]
    heads = values.reshape(out.shape[0], -1, shape.groups, shape.head_dim)[:, : shape.num_kv_heads]
    return heads.reshape(out.shape[0], -1, shape.head_dim)


def padded(x: Array, multiple: int) -> Array:
    """Append rows of zeros to `x`, up to a multiple."""
    return jnp.pad(x, [(0, -x.shape[0] % multiple), *[(0, 0)] * (x.ndim - 1)])
