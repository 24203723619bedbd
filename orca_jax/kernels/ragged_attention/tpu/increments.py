"""Attention of increments on TPUs, rows with one query, and on the way the writing of their new K and V.

    HBM   pages and page lists, as in `tpu_walk.py`
    VMEM  of eight rows: queries [8, B, M, X], outputs of the same shape, new tokens [8, W]

Increments have G queries for each KV head, too few for a matrix unit that takes eight rows at once. So several KV heads
are multiplied together, until there are M = 8 rows and the lanes X of the heads fill whole registers: B bundles. The
queries of a head are zero in the lanes of the others and, where D is no multiple of 128, in V's lanes. The tiles of
keys that the matrix unit loads are the same ones; only rows that would be padding are used.

    for eight rows                 the grid, as long as there are increments
        for row in them            its sums begin and end here
            for part of its pages  scores of [M, tokens] for each bundle

The new token of a row belongs into its last page. That page is fetched anyway, so the token is put into the fetched
block, where it is attended to, and the tile of tokens around it goes back to the page while the kernel
goes on. Nobody else reads that page: requests share full ones only. Pages of 8 bits are written beforehand, since
a new token may change the scale of its page.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from orca_jax.kernels.kv_pages import PackedPages
from orca_jax.kernels.ragged_attention.tpu.launch import launch
from orca_jax.kernels.ragged_attention.tpu.plan import Plan
from orca_jax.kernels.ragged_attention.tpu.shape import Shape
from orca_jax.kernels.ragged_attention.tpu.walk import Item, Kernel, Part, Ref, Refs, part_of, walk

_NONE = -1  # no page


def attend_increments(
    shape: Shape,
    q: Float[Array, "T H D"],
    pages: PackedPages,
    plan: Plan,
    *,
    new: Float[Array, "T W"] | None = None,
    **options: Any,
) -> tuple[Float[Array, "T H D"], PackedPages]:
    """Outputs of the first tokens, which are those of the rows with one query, and the pages with `new` of these rows.

    Args:
        shape: with rows of a query block as `query_block`.
        q: queries, scaled.
        pages: K and V.
        plan: the requests.
        new: K and V of each token as a slot has them, in the type of the pages; None where they are there already.
        options: of `launch`.
    """
    most = min(q.shape[0], plan.start.shape[0])
    queries = _pad(_bundle(shape, q[:most]), shape.query_block)
    if new is not None:
        # Registers hold tokens of 32 bits each in a line of its own.
        options["new"] = _pad(new[:most].astype(jnp.float32), shape.query_block)
    out, pages = launch(_kernel, "increments", shape, plan.increments, queries, pages, plan, axis=0, **options)
    return jnp.pad(_unbundle(shape, out)[:most], ((0, q.shape[0] - most), (0, 0), (0, 0))), pages


def _kernel(refs: Refs) -> None:
    walk(refs, _Increments(refs, (pl.program_id(0) + refs.rows.first_block) * refs.pages.shape.query_block))


@dataclass(frozen=True)
class _Increments(Kernel):
    """Each row has `[B, M, X]` of its own, M = together * G."""

    refs: Refs
    begin_of_block: jax.Array

    def begin(self) -> None:
        if (writing := self.refs.writing) is not None:
            writing[0] = writing[1] = _NONE

    def begin_row(self, row: jax.Array) -> None:
        self.refs.softmax.clear()

    def end_row(self, row: jax.Array) -> None:
        self.refs.out[row - self.begin_of_block] = self.refs.softmax.result().astype(self.refs.out.dtype)

    def visit(self, item: Item, slot: jax.Array) -> None:
        pages = self.refs.pages
        lower, upper = self.refs.rows.tokens(item)
        size = pages.shape.compute_tokens

        def one(index: jax.Array, _: None) -> None:
            part = part_of(pages, item, slot, index, pages.shape.compute_pages)
            if part.shape.is_writing:
                pl.when(part.end <= part.first + part.size)(lambda: self._insert(item, slot, part))
            self._add(item, part)

        lax.fori_loop(lower // size, pl.cdiv(upper, size), one, None)

    def _add(self, item: Item, part: Part) -> None:
        """All bundles of a part."""
        shape = part.shape
        queries = self.refs.q.at[item[1] - self.begin_of_block]
        position = part.positions(queries.shape[1])
        visible = position < part.end
        if shape.sliding_window is not None:
            visible &= position >= part.end - shape.sliding_window
        for index, bundle in enumerate(shape.bundles):
            k_lanes, v_lanes = shape.kv_lanes(*bundle)
            k = part.stored(k_lanes)
            v = k if v_lanes == k_lanes else part.stored(v_lanes)
            self.refs.softmax.add(index, queries[index, :, : k.shape[1]], k, v, visible, self._scales(part, bundle))

    def _scales(self, part: Part, bundle: tuple[int, int]) -> tuple[jax.Array, jax.Array] | None:
        """Of scores and of weights, of which there are fewer than of keys and values."""
        if not part.shape.is_quantised:
            return None
        lane, heads = bundle
        first_head = lane // (2 * part.shape.head_dim)
        return part.scales(first_head, heads, 0), part.scales(first_head, heads, 1)

    def prepare(self, item: Item, slot: jax.Array) -> None:
        if (writing := self.refs.writing) is None:
            return
        shape, pages = self.refs.pages.shape, self.refs.pages
        place = (self.refs.rows.context[item[1]] - 1) // shape.page_size - item[2] * shape.fetch_pages
        is_here = place < shape.fetch_pages
        page = pages.page(item, jnp.minimum(place, shape.fetch_pages - 1), slot)
        writing[slot] = jnp.where(is_here, page, _NONE)

    def release(self, slot: jax.Array) -> None:
        if (writing := self.refs.writing) is None:
            return

        @pl.when(writing[slot] != _NONE)
        def wait() -> None:
            anywhere = pl.ds(0, self.refs.pages.shape.tile_tokens)
            self._write(self.refs.pages.kv_buf.at[slot, anywhere], jnp.int32(0), anywhere, slot).wait()
            writing[slot] = _NONE

    def _insert(self, item: Item, slot: jax.Array, part: Part) -> None:
        """Put the new token, the last of the part, among the fetched ones, and begin to write the tile around it."""
        shape, new, writing = part.shape, self.refs.new, self.refs.writing
        assert new is not None
        assert writing is not None
        place = part.end - 1 - part.first
        first = pl.multiple_of(place // shape.tile_tokens * shape.tile_tokens, shape.tile_tokens)
        tokens = part.tokens.at[pl.ds(first, shape.tile_tokens)]
        old = tokens[...].astype(jnp.float32)
        is_new = lax.broadcasted_iota(jnp.int32, old.shape, 0) == place - first
        token = new[pl.ds(item[1] - self.begin_of_block, 1)]
        tokens[...] = jnp.where(is_new, jnp.broadcast_to(token, old.shape), old).astype(tokens.dtype)
        there = pl.ds(pl.multiple_of(lax.rem(first, shape.page_size), shape.tile_tokens), shape.tile_tokens)
        self._write(tokens, writing[slot], there, slot).start()

    def _write(self, tokens: Ref, page: jax.Array, there: Any, slot: jax.Array) -> Any:
        """The transfer of a tile to its page."""
        assert self.refs.write_sem is not None
        return pltpu.make_async_copy(tokens, self.refs.pages.kv.at[page, there], self.refs.write_sem.at[slot])


def _bundle(shape: Shape, q: Float[Array, "T H D"]) -> Float[Array, "T B M X"]:
    """Queries of increments: those of a KV head in the lanes of its keys, zeros in all other lanes of the bundle."""
    n, missing = shape.together, -shape.num_kv_heads % shape.together
    by_head = q.reshape(q.shape[0], shape.num_kv_heads, shape.groups, shape.head_dim)
    by_head = jnp.pad(by_head, ((0, 0), (0, missing), (0, 0), (0, shape.lanes - shape.head_dim)))
    bundles = by_head.reshape(q.shape[0], -1, n, shape.groups, 1, shape.lanes)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    spread = jnp.where(own, bundles, jnp.zeros_like(bundles))
    return spread.reshape(q.shape[0], bundles.shape[1], n * shape.groups, n * shape.lanes)


def _unbundle(shape: Shape, out: Float[Array, "T B M X"]) -> Float[Array, "T H D"]:
    """Outputs of increments: for each head the values of its own KV head."""
    n = shape.together
    split = out.reshape(*out.shape[:2], n, shape.groups, n, shape.lanes)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    # Not a product with 0 and 1: lanes past the last bundle's heads were never computed.
    values = jnp.where(own, split, jnp.zeros_like(split)).sum(axis=4)[..., -shape.head_dim :]
    heads = values.reshape(out.shape[0], -1, shape.groups, shape.head_dim)[:, : shape.num_kv_heads]
    return heads.reshape(out.shape[0], -1, shape.head_dim)


def _pad(x: Array, multiple: int) -> Array:
    """`x` with zeros behind its rows, up to a multiple."""
    return jnp.pad(x, [(0, -x.shape[0] % multiple), *[(0, 0)] * (x.ndim - 1)])
