"""One op, several implementations, chosen by name.

`reference` is the oracle. Each other implementation is a file of its own here and passes the same case table
(`cases.py`). One that cannot do a shape raises `NotImplementedError` and says which shapes it can.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages
from orca_jax.kernels.ragged_attention.reference import ragged_attention_reference
from orca_jax.kernels.ragged_attention.xla import ragged_attention_xla

_IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "reference": ragged_attention_reference,
    "xla": ragged_attention_xla,
}
_DEFAULT = "xla"  # runs on every backend


def implementations() -> tuple[str, ...]:
    """Names that `ragged_attention` knows."""
    return tuple(_IMPLEMENTATIONS)


def ragged_attention(
    q: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Causal attention of each request over its own pages; initiation and increment phases may be mixed.

    Request r has the queries `query_start[r] : query_start[r] + query_len[r]`; they are the last
    `query_len[r]` of its `context_len[r]` tokens, whose K and V already stand in the pages
    `page_table[r]`. Requests come in the order of `query_start`, those with one query first, absent ones
    (`query_len` 0) last.

    Args:
        q: queries of all requests, flattened; tokens past the last request are padding.
        pages: K and V.
        page_table: pages of each request, as indices into `pages`; entries past its context are not read.
        query_start: first query of each request.
        query_len: number of queries; 0 for rows without a request.
        context_len: tokens in the cache after this iteration.
        scale: factor on the scores, usually 1 / sqrt(D).
        implementation: a name from `implementations()`; None takes the backend's default.

    Returns:
        The attention output for each query; rows of padding tokens hold finite values that mean nothing.

    Raises:
        NotImplementedError: the implementation does not exist or cannot do these shapes.
    """
    name = implementation or _DEFAULT
    if name not in _IMPLEMENTATIONS:
        raise NotImplementedError(f"no attention implementation {name!r}; there are {', '.join(_IMPLEMENTATIONS)}")
    return _IMPLEMENTATIONS[name](q, pages, page_table, query_start, query_len, context_len, scale=scale)
