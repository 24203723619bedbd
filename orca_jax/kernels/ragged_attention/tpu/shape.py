"""What a TPU attention kernel is compiled for, and what follows from that."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax

from orca_jax.kernels.kv_pages import tile_tokens

LANES = 128
SUBLANES = 8


@dataclass(frozen=True)
class Shape:
    """Sizes and types of a kernel."""

    num_kv_heads: int
    groups: int  # G
    head_dim: int
    page_size: int
    page_dtype: Any
    query_block: int
    fetch_pages: int
    compute_pages: int
    whole_pages: int
    sliding_window: int | None
    soft_cap: float | None
    compute_dtype: Any
    is_quantised: bool
    is_writing: bool = False  # whether new tokens go to their pages on the way

    @property
    def fetch_tokens(self) -> int:
        """Tokens in a fetched block."""
        return self.fetch_pages * self.page_size

    @property
    def compute_tokens(self) -> int:
        """Tokens that are multiplied at a time."""
        return self.compute_pages * self.page_size

    @property
    def tile_tokens(self) -> int:
        """Tokens that pages are written by."""
        return tile_tokens(self.page_dtype)

    @property
    def splits_kv(self) -> bool:
        """Whether K and V of a head fill whole registers, so that each can be read without the other."""
        return self.head_dim % LANES == 0

    @property
    def lanes(self) -> int:
        """Lanes that queries of one head are multiplied with, and that their outputs have."""
        return self.head_dim if self.splits_kv else 2 * self.head_dim

    @property
    def together(self) -> int:
        """KV heads that increments are multiplied with at once."""
        if self.splits_kv:
            return 1
        heads = range(1, self.num_kv_heads)
        fitting = (n for n in heads if n * self.lanes % LANES == 0 and n * self.groups >= SUBLANES)
        return next(fitting, self.num_kv_heads)

    @cached_property
    def bundles(self) -> tuple[tuple[int, int], ...]:
        """First lane and number of KV heads of each such bundle; the last may have fewer heads."""
        firsts = range(0, self.num_kv_heads, self.together)
        return tuple((2 * self.head_dim * h, min(self.together, self.num_kv_heads - h)) for h in firsts)

    def kv_lanes(self, first: int, heads: int) -> tuple[slice, slice]:
        """Lanes of the keys and of the values of some heads: the same where they share registers."""
        if self.splits_kv:
            middle = first + self.head_dim
            return slice(first, middle), slice(middle, middle + self.head_dim)
        both = slice(first, first + heads * self.lanes)
        return both, both

    @property
    def precision(self) -> lax.Precision:
        """Of matrix products."""
        return lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
