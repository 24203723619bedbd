"""The sizes and types of a compiled TPU attention kernel, and the layout derived from them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from orca_jax.kernels.kv_pages import tile_tokens

LANES = 128
SUBLANES = 8


@dataclass(frozen=True)
class TpuShape:
    """Sizes and types of a kernel, constant when it is compiled."""

    num_kv_heads: int
    groups: int  # G
    head_dim: int
    page_size: int
    page_dtype: Any
    query_block: int
    fetch_pages: int
    compute_pages: int
    whole_pages: int
    # its size is a scalar of the call, so that layers with several sizes can share a kernel
    has_window: bool
    soft_cap: float | None
    compute_dtype: Any
    is_quantised: bool
    has_sinks: bool = False
    is_writing: bool = False  # the kernel also writes new tokens to their pages
    is_single: bool = False  # each row has one query
    buffers: int = 2  # fetches in VMEM
    has_values: bool = True  # False: pages [D, S] of latents, whose keys are the values too

    @property
    def fetch_tokens(self) -> int:
        """Tokens in a fetch."""
        return self.fetch_pages * self.page_size

    def place_of(self, index: jax.Array) -> Any:
        """The place of a page in the buffer of a fetch."""
        if self.has_values:
            return pl.ds(pl.multiple_of(index * self.page_size, self.page_size), self.page_size)
        return index

    @property
    def compute_tokens(self) -> int:
        """Tokens in a part of a fetch."""
        return self.compute_pages * self.page_size

    @property
    def tile_tokens(self) -> int:
        """Tokens in a register tile, the unit in which pages are written."""
        return tile_tokens(self.page_dtype)

    @property
    def splits_kv(self) -> bool:
        """True if K and V of a head fill whole registers, so each can be read without the other."""
        return self.head_dim % LANES == 0

    @property
    def lanes(self) -> int:
        """Lanes of the queries and outputs of one head: D, or 2 D if K and V share registers."""
        if self.splits_kv or not self.has_values:
            return self.head_dim
        return 2 * self.head_dim

    @property
    def bundle_heads(self) -> int:
        """Number of KV heads in one product of increments, a bundle."""
        if self.splits_kv:
            return 1
        heads = range(1, self.num_kv_heads)
        fitting = (n for n in heads if n * self.lanes % LANES == 0 and n * self.groups >= SUBLANES)
        return next(fitting, self.num_kv_heads)

    @cached_property
    def bundles(self) -> tuple[tuple[int, int], ...]:
        """First lane and number of KV heads of each bundle; the last bundle may have fewer heads."""
        firsts = range(0, self.num_kv_heads, self.bundle_heads)
        return tuple(
            (2 * self.head_dim * h, min(self.bundle_heads, self.num_kv_heads - h)) for h in firsts
        )

    def kv_lanes(self, first: int, heads: int) -> tuple[slice, slice]:
        """Lanes of the keys and of the values of some heads; the same lanes if they share registers."""
        if self.splits_kv:
            middle = first + self.head_dim
            return slice(first, middle), slice(middle, middle + self.head_dim)
        both = slice(first, first + heads * self.lanes)
        return both, both

    @property
    def precision(self) -> lax.Precision:
        """Precision of matrix products."""
        return lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else lax.Precision.DEFAULT
