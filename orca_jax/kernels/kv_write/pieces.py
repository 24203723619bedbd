"""What an iteration writes, cut by pages: a piece is what one request writes to one page."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from orca_jax.kernels.work_list import lay_out


class Pieces(NamedTuple):
    """What goes to one page: `[M]` each, of which the first `count` exist. No two of them have the same page.

    Kernels get the fields one by one, and may then put references in their places.
    """

    page: Int[Array, " M"]
    begin: Int[Array, " M"]  # first place that is written
    end: Int[Array, " M"]  # last place, exclusive
    token: Int[Array, " M"]  # which of the new tokens would go to place 0; may be before the first
    first_page: Int[Array, "1"]  # of the layer: added to every page

    def page_of(self, piece: Int[Array, ""]) -> Int[Array, ""]:
        """Where a piece goes in this layer."""
        page: Array = self.page[piece] + self.first_page[0]
        return page


def cut(
    page_size: int,
    num_tokens: int,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
) -> tuple[Int[Array, ""], Pieces]:
    """How many pieces there are, and room for as many as there may be; requests are described as for `write_kv`.

    Args:
        page_size: tokens in a page.
        num_tokens: T, new tokens and padding of all requests.
        page_table: pages of each request.
        query_start: first token of each request.
        query_len: number of new tokens; 0 for rows that write nothing.
        context_len: tokens in the cache after this iteration.
    """
    first, rows = context_len - query_len, query_len.shape[0]
    count = jnp.where(query_len > 0, (context_len + page_size - 1) // page_size - first // page_size, 0)
    # A page gets one token at least; a request fills some, and begins and ends in two others.
    most = min(num_tokens, num_tokens // page_size + 2 * min(rows, num_tokens))
    row, of_row, _, total = lay_out(count, most)
    index = jnp.clip(first[row] // page_size + of_row, 0, page_table.shape[1] - 1)  # of pieces that do not exist
    start = index * page_size
    pieces = Pieces(
        page_table[row, index],
        jnp.maximum(first[row] - start, 0),
        jnp.minimum(context_len[row] - start, page_size),
        query_start[row] + start - first[row],
        jnp.zeros(1, jnp.int32),
    )
    return total[0], pieces
