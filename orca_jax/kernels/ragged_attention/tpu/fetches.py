"""The order of steps, and the transfers of a step: rows, page numbers, pages and scales; see `walk.py`."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from orca_jax.kernels.ragged_attention.tpu.shape import LANES, TpuShape

Ref = Any  # Pallas has no public type for references
Step = tuple[jax.Array, jax.Array, jax.Array]
"""Block, row and fetch."""


class RowScalars:
    """The scalars of a call, in scalar memory: blocks, rows and their lengths, and the order of steps."""

    def __init__(
        self,
        shape: TpuShape,
        ends: Any,
        first_row: Any,
        end_row: Any,
        start: Any,
        length: Any,
        context: Any,
        first_page: Any,
        window: Any,
    ) -> None:
        self.shape = shape
        self.first_page = first_page
        self.window = window
        self.first_block = ends[0]
        self.end_block = ends[1]
        self.first_row = first_row
        self.end_row = end_row
        self.start = start
        self.length = length
        self.context = context

    def visible(self, block: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) position visible to the row's queries in a block."""
        if self.shape.is_single:
            end = self.context[row]
            if not self.shape.has_window:
                return jnp.zeros_like(end), end
            return jnp.maximum(end - self.window[0], 0), end
        size = self.shape.query_block
        first = jnp.maximum(block * size - self.start[row], 0)
        end = jnp.minimum((block + 1) * size - self.start[row], self.length[row])
        before = self.context[row] - self.length[row]
        if not self.shape.has_window:
            return jnp.zeros_like(before), before + end
        return jnp.maximum(before + first + 1 - self.window[0], 0), before + end

    def fetches(self, block: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) fetch of a row for a block."""
        begin, end = self.visible(block, row)
        return begin // self.shape.fetch_tokens, pl.cdiv(end, self.shape.fetch_tokens)

    def tokens(self, step: Step) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) visible token of a step's fetch, for the row's queries."""
        begin, end = self.visible(step[0], step[1])
        first = step[2] * self.shape.fetch_tokens
        return jnp.maximum(begin - first, 0), jnp.minimum(end - first, self.shape.fetch_tokens)

    def num_pages(self, step: Step) -> jax.Array:
        """Number of pages of a step's fetch up to the last one that a query of the row sees."""
        block, row, fetch = step
        _, end = self.visible(block, row)
        return jnp.minimum(
            pl.cdiv(end, self.shape.page_size) - fetch * self.shape.fetch_pages,
            self.shape.fetch_pages,
        )

    def first_page_of(self, step: Step) -> jax.Array | int:
        """Index of the first page of a step's fetch that a query of the row sees."""
        if not self.shape.has_window:
            return 0
        return self.tokens(step)[0] // self.shape.page_size

    def first_step(self, block: jax.Array) -> Step:
        """First step of a block."""
        row = self.first_row[block]
        return block, row, self.fetches(block, row)[0]

    def exists(self, step: Step) -> jax.Array:
        """True if the step is not past the last one."""
        return step[0] < self.end_block

    def following(self, step: Step) -> Step:
        """The step after `step`; after the last one, a step in `end_block`."""
        block, row, fetch = step
        is_inside = block < self.end_block
        safe = jnp.minimum(block, self.end_block - 1)
        same_row = is_inside & (fetch + 1 < self.fetches(safe, row)[1])
        same_block = is_inside & (same_row | (row + 1 < self.end_row[safe]))
        next_block = jnp.where(same_block, block, jnp.minimum(block + 1, self.end_block))
        new_block = jnp.minimum(next_block, self.end_block - 1)
        next_row = jnp.where(
            same_row, row, jnp.where(same_block, row + 1, self.first_row[new_block])
        )
        next_fetch = jnp.where(same_row, fetch + 1, self.fetches(new_block, next_row)[0])
        return next_block, next_row, next_fetch


@dataclass(frozen=True)
class Pages:
    """The transfers of pages, their scales and page lists into the two buffers."""

    shape: TpuShape
    rows: RowScalars
    lists: Ref  # the page table in scalar memory, or lists of it elsewhere
    kv: Ref
    scale: Ref | None
    list_buf: Ref | None  # None if the page table is in scalar memory
    kv_buf: Ref
    scale_buf: Ref | None
    list_sem: Ref | None
    kv_sem: Ref
    scale_sem: Ref | None

    @property
    def has_lists(self) -> bool:
        """True if lists of pages are fetched."""
        return self.list_buf is not None

    def _list_copy(self, index: jax.Array, buffer: jax.Array) -> Any:
        assert self.list_buf is not None
        assert self.list_sem is not None
        return pltpu.make_async_copy(
            self.lists.at[index], self.list_buf.at[buffer], self.list_sem.at[buffer]
        )

    def _page_copies(self, page: jax.Array, index: jax.Array, buffer: jax.Array) -> Iterable[Any]:
        there = self.kv_buf.at[buffer, self.shape.place_of(index)]
        stored = self.kv.at[page] if self.shape.has_values else self.kv.at[page, 0]
        yield pltpu.make_async_copy(stored, there, self.kv_sem.at[buffer])
        if self.scale is not None and self.scale_buf is not None and self.scale_sem is not None:
            there = self.scale_buf.at[buffer, index]
            yield pltpu.make_async_copy(self.scale.at[page], there, self.scale_sem.at[buffer])

    def start_list(self, step: Step, buffer: jax.Array) -> None:
        """Start the transfer of the page list of a step."""
        lists_per_row = self.lists.shape[0] // self.rows.start.shape[0]
        index = step[1] * lists_per_row + step[2] * self.shape.fetch_pages // LANES
        self._list_copy(index, buffer).start()

    def wait_list(self, buffer: jax.Array) -> None:
        """Wait for a page list."""
        self._list_copy(jnp.int32(0), buffer).wait()

    def page(self, step: Step, index: jax.Array, buffer: jax.Array) -> jax.Array:
        """The page at an index of a step's fetch; the step's page list, if any, must still be in the buffer."""
        index += step[2] * self.shape.fetch_pages
        if self.list_buf is None:
            place = step[1] * (self.lists.shape[0] // self.rows.context.shape[0]) + index
            page: jax.Array = self.lists[place]
        else:
            page = self.list_buf[buffer, 0, lax.rem(index, LANES)]
        return page + self.rows.first_page[0]

    def start(self, step: Step, buffer: jax.Array) -> None:
        """Start the transfers of a step's pages; its page list must be in the buffer."""

        def start_one(index: jax.Array, _: None) -> None:
            for copy in self._page_copies(self.page(step, index, buffer), index, buffer):
                copy.start()

        lax.fori_loop(self.rows.first_page_of(step), self.rows.num_pages(step), start_one, None)

    def wait(self, step: Step, buffer: jax.Array) -> None:
        """Wait for the pages of a step."""

        def wait_one(index: jax.Array, _: None) -> None:
            for copy in self._page_copies(jnp.int32(0), index, buffer):
                copy.wait()

        lax.fori_loop(self.rows.first_page_of(step), self.rows.num_pages(step), wait_one, None)

    def clear(self, buffer: jax.Array) -> None:
        """Set a buffer to zero before its first fetch: unwritten memory may hold NaN, and NaN times zero is NaN."""

        def clear_one(index: jax.Array, _: None) -> None:
            page = self.kv_buf.at[buffer, self.shape.place_of(index)]
            page[...] = jnp.zeros(page.shape, page.dtype)

        lax.fori_loop(0, self.shape.fetch_pages, clear_one, None)

    def clear_unwritten(self, step: Step, buffer: jax.Array) -> None:
        """Set the tokens past the last visible one to zero in its page: later ones may hold NaN."""
        end = self.rows.visible(step[0], step[1])[1] - step[2] * self.shape.fetch_tokens
        is_inside = (end < self.shape.fetch_tokens) & (lax.rem(end, self.shape.page_size) > 0)
        pl.when(is_inside)(lambda: self._keep(buffer, end, lambda token: token < end))

    def clear_passed(self, step: Step, buffer: jax.Array) -> None:
        """Set the tokens before a window to zero in the page where it begins."""
        if not self.shape.has_window:
            return
        begin = self.rows.visible(step[0], step[1])[0] - step[2] * self.shape.fetch_tokens
        is_inside = (begin > 0) & (lax.rem(begin, self.shape.page_size) > 0)
        pl.when(is_inside)(lambda: self._keep(buffer, begin, lambda token: token >= begin))

    def _keep(
        self, buffer: jax.Array, token: jax.Array, is_kept: Callable[[jax.Array], jax.Array]
    ) -> None:
        """Set the other tokens in the page of a token to zero."""
        index = token // self.shape.page_size
        page = self.kv_buf.at[buffer, self.shape.place_of(index)]
        axis = 0 if self.shape.has_values else 1
        tokens = lax.broadcasted_iota(jnp.int32, page.shape, axis) + index * self.shape.page_size
        stored = page[...]
        if self.shape.is_quantised:
            stored = stored.astype(jnp.int32 if stored.dtype == jnp.uint8 else jnp.float32)
        page[...] = jnp.where(is_kept(tokens), stored, jnp.zeros_like(stored)).astype(page.dtype)
