"""K/V pages: where the keys and values of running requests live.

    k, v  [N, K, D, S]      N = num_layers * num_pages; page p of layer l is l * num_pages + p

A page holds S consecutive tokens of one request, the token axis last: the inner loops of attention then run over
contiguous memory, which XLA:CPU wants for a batched matrix product. One flat page axis for all layers lets the
cache be a plain carry of the scan over layers, which XLA updates in place.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class KVPages(NamedTuple):
    """Keys and values of all layers; a pytree, donated from one iteration to the next."""

    k: Float[Array, "N K D S"]
    v: Float[Array, "N K D S"]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k.shape[3]

    @classmethod
    def shape_of(
        cls, num_layers: int, num_pages: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: jnp.dtype
    ) -> "KVPages":
        """Abstract pages: shapes and dtypes without memory."""
        page = jax.ShapeDtypeStruct((num_layers * num_pages, num_kv_heads, head_dim, page_size), dtype)
        return cls(page, page)  # type: ignore[arg-type]
