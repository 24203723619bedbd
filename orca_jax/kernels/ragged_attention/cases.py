"""The case table of the backends' tests, and the arrays of each case."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from orca_jax.kernels.kv_pages import (
    HeadMajorPages,
    KVPages,
    RowArrays,
    TokenMajorPages,
    as_bytes,
    needs_scales,
)
from orca_jax.kernels.ragged_attention.api import NO_WINDOW, Scores
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import PageLayout


@dataclass(frozen=True)
class Case:
    """A merged batch: for each request (tokens in this iteration, context length after it)."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    page_size: int = 8
    padding_tokens: int = 0
    padding_rows: int = 0
    scale: float = 0.25
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of queries
    page_dtype: Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"] = "float32"
    has_values: bool = True  # False: the keys are the values too, in head-major pages
    # in slots that no query may see; integer pages have a large number instead
    filler: float = math.nan

    @property
    def scores(self) -> Scores:
        """Factor, window, cap and sinks."""
        sinks = jnp.linspace(-1, 2, self.num_heads) if self.has_sinks else None
        return Scores(self.scale, self.sliding_window, self.soft_cap, sinks=sinks)

    @property
    def tolerance(self) -> float:
        """The allowed difference from the oracle, which computes in float32, for outputs of order one."""
        return 1e-5 if (self.dtype, self.page_dtype) == ("float32", "float32") else 0.03


class Arrays(NamedTuple):
    """Arguments of `ragged_attention`, without the scores."""

    q: np.ndarray
    pages: KVPages
    requests: RowArrays


CASES = (
    Case("one token", ((1, 1),)),
    Case("increments at different indices", ((1, 1), (1, 8), (1, 9), (1, 31))),
    Case("prompt of exactly one page", ((8, 8),)),
    Case("prompts of different lengths", ((2, 2), (3, 3), (17, 17))),
    Case("both phases: the paper's Figure 5", ((1, 3), (1, 5), (2, 2), (3, 3))),
    Case(
        "increments and chunks with padding",
        ((1, 9), (1, 16), (4, 20), (9, 9)),
        padding_tokens=5,
        padding_rows=3,
    ),
    Case("more queries than one block", ((1, 40), (150, 150), (130, 300)), page_size=16),
    Case(
        "tokens to verify beside chunks",
        ((1, 9), (5, 20), (16, 16), (33, 40), (140, 160)),
        page_size=16,
    ),
    Case("prompt of one token among prompts", ((1, 1), (2, 2), (2, 2))),
    Case("all heads share one", ((1, 11), (6, 10)), num_heads=4, num_kv_heads=1),
    Case("grouped heads of 64, pages of 128", ((1, 200), (1, 129), (40, 140)), 12, 4, 64, 128),
    Case("25 heads of 64", ((1, 17), (5, 5)), 25, 25, 64, 16),
    Case("3 heads of 80", ((1, 17), (5, 5)), 3, 3, 80, 16),
    Case("heads of 96", ((1, 17), (5, 21)), 4, 2, 96, 16, padding_tokens=2),
    Case("heads of 128", ((1, 17), (5, 21)), 8, 2, 128, 16),
    Case("heads of 256", ((1, 17), (5, 5)), 2, 1, 256, 16),
    Case("sliding window", ((1, 5), (1, 40), (3, 4), (20, 37)), num_kv_heads=2, sliding_window=6),
    Case(
        "window and soft cap", ((1, 40), (20, 37)), num_kv_heads=2, sliding_window=17, soft_cap=2.0
    ),
    Case(
        "window among infinities",
        ((1, 40), (20, 37)),
        num_kv_heads=2,
        sliding_window=11,
        filler=math.inf,
    ),
    Case(
        "sinks and window",
        ((1, 40), (1, 3), (20, 37)),
        6,
        2,
        64,
        16,
        sliding_window=11,
        has_sinks=True,
    ),
    Case(
        "window over int8 pages",
        ((1, 90), (1, 30), (6, 70)),
        6,
        3,
        64,
        32,
        sliding_window=40,
        page_dtype="int8",
    ),
    Case(
        "bfloat16", ((1, 9), (6, 20)), 6, 3, dtype="bfloat16", page_dtype="bfloat16", page_size=16
    ),
    Case("int8 pages", ((1, 9), (1, 40), (6, 20)), 6, 3, 64, 32, page_dtype="int8"),
    Case(
        "fp8 pages", ((1, 9), (6, 20)), 6, 3, 64, 32, dtype="bfloat16", page_dtype="float8_e4m3fn"
    ),
    Case("pages of 256 tokens", ((1, 300), (4, 258)), 2, 1, 64, 256),
)


def _latents(name: str, requests: tuple[tuple[int, int], ...], **sizes: Any) -> Case:
    """A case of pages without values."""
    small = {"num_kv_heads": 1, "head_dim": 48, "page_size": 128, "has_values": False}
    return Case(name, requests, **{**small, **sizes})


LATENT_CASES = (
    _latents("latents: increments", ((1, 1), (1, 128), (1, 129), (1, 300)), padding_rows=2),
    _latents(
        "latents: both phases",
        ((1, 9), (1, 700), (5, 133), (16, 16), (70, 200)),
        padding_tokens=3,
        padding_rows=1,
    ),
    _latents("latents: pages of 256", ((1, 300), (3, 140), (30, 513)), page_size=256),
    _latents(
        "latents of DeepSeek in bfloat16",
        ((1, 77), (1, 257), (4, 260), (9, 9)),
        num_heads=16,
        head_dim=576,
        scale=0.05,
        dtype="bfloat16",
        page_dtype="bfloat16",
    ),
    _latents("latents in int8", ((1, 9), (1, 400), (6, 130)), head_dim=64, page_dtype="int8"),
    _latents(
        "latents in fp8",
        ((1, 9), (1, 400), (6, 130)),
        head_dim=64,
        dtype="bfloat16",
        page_dtype="float8_e4m3fn",
    ),
    _latents("latents in a window", ((1, 400), (40, 333)), sliding_window=150, soft_cap=2.0),
)
"""Pages without values, of 128 tokens or more, which fill whole registers of a TPU."""


HOPPER_CASES = (
    *CASES,
    Case(
        "17 heads each of 3 KV heads: two fit a tile of 64",
        ((1, 300), (1, 40), (3, 3)),
        51,
        3,
        padding_tokens=2,
    ),
    Case("pieces of 16 blocks", ((1, 2000), (1, 77)), 4, 2, 128, 64),
)
"""With cases for the limits of the kernels for Hopper."""


def fitted(case: Case, head_dims: Collection[int], page_sizes: Collection[int]) -> Case:
    """The case in bfloat16, with the nearest head dim and page size of these."""
    head_dim = min((dim for dim in head_dims if dim >= case.head_dim), default=max(head_dims))
    page_size = max(case.page_size, min(page_sizes))
    return replace(
        case, dtype="bfloat16", page_dtype="bfloat16", head_dim=head_dim, page_size=page_size
    )


def make_arrays(case: Case, seed: int = 0, layout: PageLayout = "head_major") -> Arrays:
    """Random arrays for a case, on scattered pages.

    Slots that no query may see hold the filler: unwritten ones, those before the windows, and pages of no request.
    """
    rng = np.random.default_rng(seed)
    rows = len(case.requests) + case.padding_rows
    query_len = np.zeros(rows, np.int32)
    context_len = np.zeros(rows, np.int32)
    query_len[: len(case.requests)] = [tokens for tokens, _ in case.requests]
    context_len[: len(case.requests)] = [context for _, context in case.requests]
    num_tokens = int(query_len.sum()) + case.padding_tokens
    query_start = (np.cumsum(query_len) - query_len).astype(np.int32)

    pages_per_row = ceil_div(int(context_len.max()), case.page_size) + 1
    num_pages = rows * pages_per_row + 1
    page_table = rng.permutation(num_pages).astype(np.int32)[:-1].reshape(rows, pages_per_row)
    position = np.arange(pages_per_row * case.page_size).reshape(
        pages_per_row, 1, 1, case.page_size
    )
    begin, end = (
        each[:, None, None, None, None]
        for each in (context_len - query_len + 1 - (case.sliding_window or NO_WINDOW), context_len)
    )
    seen = np.zeros((num_pages, 1, 1, case.page_size), bool)
    seen[page_table] = (position >= begin) & (position < end)
    k, v = (_pool(rng, case, seen) for _ in range(2))
    q = rng.standard_normal((num_tokens, case.num_heads, case.head_dim)).astype(
        jnp.dtype(case.dtype)
    )
    requests = RowArrays(page_table, query_start, query_len, context_len)  # type: ignore[arg-type]
    of_token = np.where(seen[:, :, 0], 1, np.float32(case.filler))
    if not case.has_values:
        both = _lay_out(k, k, of_token, "head_major")
        assert isinstance(both, HeadMajorPages)
        return Arrays(q, both._replace(v=None, v_scale=None), requests)
    return Arrays(q, _lay_out(k, v, of_token, layout), requests)


def _pool(
    rng: np.random.Generator, case: Case, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Stored values `[N, K, D, S]`, and scales `[N, K]` if the type needs them."""
    shape = (seen.shape[0], case.num_kv_heads, case.head_dim, case.page_size)
    values = rng.standard_normal(shape).astype(np.float32)
    dtype = jnp.dtype(case.page_dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    scale = None
    if needs_scales(dtype):
        scale = rng.uniform(0.02, 0.04, shape[:2]).astype(np.float32)
        values = values / scale[..., None, None]
        scale[~seen.any(axis=(1, 2, 3))] = case.filler
    values = np.where(seen, np.clip(values, -120, 120), 127 if is_integer else case.filler)
    return values.astype(dtype), scale


def _lay_out(
    k: tuple[np.ndarray, np.ndarray | None],
    v: tuple[np.ndarray, np.ndarray | None],
    of_token: np.ndarray,
    layout: PageLayout,
) -> KVPages:
    """The same pages in a layout. A head-major page has scales of each token: those of its page times `of_token`."""
    if layout == "head_major":
        scales = [None if scale is None else scale[..., None] * of_token for scale in (k[1], v[1])]
        pages: list[Any] = [np.asarray(as_bytes(jnp.asarray(each[0]))) for each in (k, v)]
        return HeadMajorPages(*pages, *scales)
    kv = np.stack([k[0], v[0]], axis=2).transpose(0, 4, 1, 2, 3)  # [N, S, K, 2, D]
    scale = None
    if k[1] is not None and v[1] is not None:
        scale = np.stack([k[1], v[1]], axis=-1).reshape(kv.shape[0], 1, -1)
    return TokenMajorPages(kv.reshape(*kv.shape[:2], -1), scale)  # type: ignore[arg-type]
