"""Cases of increments, and attention by its definition."""

from bisect import bisect
from collections.abc import Hashable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.kernels.kv_pages import HeadMajorPages
from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.cases import Arrays, Case, make_arrays
from orca_jax.kernels.ragged_attention.tpu.blocks import BlockSizes

TINY = BlockSizes(
    increment_rows=2,
    query_block=16,
    fetch_pages=2,
    compute_pages=1,
    whole_pages=2,
    increment_pages=2,
    part_pages=1,
    buffers=3,
)
"""Sizes of the TPU kernels' blocks: many steps from few tokens."""

INCREMENTS = [
    Case("one page, partly filled", ((1, 1), (1, 15)), page_size=16),
    Case(
        "whole pages and parts of one",
        ((1, 16), (1, 17), (1, 64)),
        page_size=16,
        padding_tokens=2,
        padding_rows=1,
    ),
    Case("pages of 128, heads of 64", ((1, 200), (1, 129), (1, 128), (1, 3)), 4, 4, 64, 128),
    Case("two heads of each KV head", ((1, 200), (1, 31)), 6, 3, 64, 32),
    Case("four small heads of each KV head", ((1, 200), (1, 31)), 8, 2, 8, 32),
    Case("window within a page", ((1, 5), (1, 64), (1, 70)), page_size=32, sliding_window=6),
    Case(
        "window over pages, soft cap",
        ((1, 40), (1, 90)),
        4,
        2,
        page_size=16,
        sliding_window=37,
        soft_cap=2.0,
    ),
    Case("soft cap", ((1, 40), (1, 90)), 4, 2, page_size=16, soft_cap=2.0),
    Case(
        "increments in bfloat16",
        ((1, 40), (1, 33)),
        6,
        3,
        dtype="bfloat16",
        page_dtype="bfloat16",
        page_size=16,
    ),
    Case("float16", ((1, 40), (1, 33)), 6, 3, dtype="float16", page_dtype="float16", page_size=16),
]


def aspects(case: Case) -> tuple[Hashable, ...]:
    """What an implementation may treat apart: the default run shows each value in some case."""
    return (*meanings(case), case.head_dim, case.page_size, case.num_heads // case.num_kv_heads)


def meanings(case: Case) -> tuple[Hashable, ...]:
    """The aspects for an implementation that treats all sizes alike."""
    longest = bisect(LENGTHS, max(count for count, _ in case.requests))
    types, is_grouped = (case.dtype, case.page_dtype), case.num_heads > case.num_kv_heads
    scores = (
        case.sliding_window is not None,
        case.soft_cap is not None,
        case.has_sinks,
        np.isinf(case.filler),
    )
    return (*types, case.padding_tokens > 0, *scores, is_grouped, longest)


LENGTHS = (2, 17, 129)  # the least of chunks of one short block, of several, and of a long one


def run(arrays: Arrays, case: Case, implementation: str) -> np.ndarray:
    args = jax.tree.map(jnp.asarray, arrays)
    attend = jax.jit(lambda a: ragged_attention(*a, case.scores, implementation=implementation))
    return np.asarray(attend(args))


@cache
def reference(case: Case) -> np.ndarray:
    """The attention of a case with seed 1, to compare backends with. Padding has zeros."""
    return numpy_attention(case, make_arrays(case, seed=1)).astype(np.float32)


def numpy_attention(case: Case, arrays: Arrays) -> np.ndarray:
    """Attention by its definition: each query separately, in float64, without a compiled program."""
    out = np.zeros(arrays.q.shape)
    assert isinstance(arrays.pages, HeadMajorPages)
    stored = arrays.pages.k, arrays.pages.v
    scales = arrays.pages.k_scale, arrays.pages.v_scale
    if not case.has_values:
        stored = (arrays.pages.k, arrays.pages.k)
        scales = (arrays.pages.k_scale, arrays.pages.k_scale)
    sinks = None if case.scores.sinks is None else np.asarray(case.scores.sinks, np.float64)
    for row, (count, context) in enumerate(case.requests):
        k, v = (
            np.concatenate([_page(pool, scale, page) for page in arrays.requests.page_table[row]])
            for pool, scale in zip(stored, scales, strict=True)
        )
        for i in range(count):
            token = arrays.requests.query_start[row] + i
            end = context - count + i + 1
            begin = 0 if case.sliding_window is None else max(0, end - case.sliding_window)
            for head in range(case.num_heads):
                kv_head = head * case.num_kv_heads // case.num_heads
                scores = (
                    k[begin:end, kv_head] @ arrays.q[token, head].astype(np.float64) * case.scale
                )
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                weights = np.exp(scores - scores.max())
                extra = 0.0 if sinks is None else np.exp(sinks[head] - scores.max())
                out[token, head] = weights @ v[begin:end, kv_head] / (weights.sum() + extra)
    return out


def _page(pool: np.ndarray, scale: np.ndarray | None, page: int) -> np.ndarray:
    values = pool[page].view(jnp.float8_e4m3fn) if pool.dtype == np.uint8 else pool[page]
    tokens = values.transpose(2, 0, 1).astype(np.float64)
    return tokens if scale is None else tokens * scale[page].T[..., None]
