"""The new tokens of an iteration, cut by pages. A piece is the tokens of one request for one page."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from orca_jax.kernels.kv_pages import RowArrays
from orca_jax.kernels.work_list import lay_out


class PagePieces(NamedTuple):
    """Pieces as arrays `[M]`; only the first `count` entries are valid. No two pieces have the same page.

    Kernels receive the fields one by one; inside a kernel, the fields may be references.
    """

    page: Int[Array, " M"]
    begin: Int[Array, " M"]  # first slot that is written
    end: Int[Array, " M"]  # last slot, exclusive
    token: Int[Array, " M"]  # index (possibly negative) of the token that would land in slot 0
    first_page: Int[Array, "1"]  # first page of the layer, added to every page

    def page_of(self, piece: Int[Array, ""]) -> Int[Array, ""]:
        """The page of a piece in this layer."""
        page: Array = self.page[piece] + self.first_page[0]
        return page


def cut(page_size: int, num_tokens: int, requests: RowArrays) -> tuple[Int[Array, ""], PagePieces]:
    """Cut new tokens into pieces. Returns their number, and arrays for as many as there may be.

    Args:
        page_size: tokens in a page.
        num_tokens: T, the new tokens of all requests with padding.
        requests: the requests; `query_len` is 0 for rows without tokens to write.
    """
    page_table, query_start, query_len, context_len = requests
    first = context_len - query_len
    rows = query_len.shape[0]
    count = jnp.where(
        query_len > 0, (context_len + page_size - 1) // page_size - first // page_size, 0
    )
    # Each piece has a token at least. A request fills some pages, and begins and ends in two others.
    most = min(num_tokens, num_tokens // page_size + 2 * min(rows, num_tokens))
    row, of_row, _, total = lay_out(count, most)
    # clipped for invalid pieces
    index = jnp.clip(first[row] // page_size + of_row, 0, page_table.shape[1] - 1)
    start = index * page_size
    pieces = PagePieces(
        page_table[row, index],
        jnp.maximum(first[row] - start, 0),
        jnp.minimum(context_len[row] - start, page_size),
        query_start[row] + start - first[row],
        jnp.zeros(1, jnp.int32),
    )
    return total[0], pieces
