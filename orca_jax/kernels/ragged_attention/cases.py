"""The case table that every implementation passes, and the arrays that a case stands for."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orca_jax.kernels.kv_pages import KVPages


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


class Arrays(NamedTuple):
    """Arguments of `ragged_attention` by name, without `scale`."""

    q: np.ndarray
    pages: KVPages
    page_table: np.ndarray
    query_start: np.ndarray
    query_len: np.ndarray
    context_len: np.ndarray


CASES = (
    Case("one token", ((1, 1),)),
    Case("one increment", ((1, 13),)),
    Case("increments at different indices", ((1, 1), (1, 8), (1, 9), (1, 31))),
    Case("one prompt", ((7, 7),)),
    Case("prompt of exactly one page", ((8, 8),)),
    Case("prompts of different lengths", ((2, 2), (3, 3), (17, 17))),
    Case("both phases: the paper's Figure 5", ((1, 3), (1, 5), (2, 2), (3, 3))),
    Case("chunk of a longer prompt", ((5, 21),)),
    Case("increments and chunks with padding", ((1, 9), (1, 16), (4, 20), (9, 9)), padding_tokens=5, padding_rows=3),
    Case("more queries than one block", ((1, 40), (150, 150), (130, 300)), page_size=16),
    Case("prompt of one token among prompts", ((1, 1), (2, 2), (2, 2))),
    Case("grouped heads, 3 to 1", ((1, 11), (6, 10)), num_heads=12, num_kv_heads=4),
    Case("all heads share one", ((1, 11), (6, 10)), num_heads=4, num_kv_heads=1),
    Case("12 heads of 64, pages of 128", ((1, 200), (1, 129), (40, 140)), 12, 12, 64, 128),
    Case("25 heads of 64", ((1, 17), (5, 5)), 25, 25, 64, 16),
    Case("3 heads of 80", ((1, 17), (5, 5)), 3, 3, 80, 16),
)


def make_arrays(case: Case, seed: int = 0) -> Arrays:
    """Random arrays for a case: scattered pages, NaN in every slot that no request wrote."""
    rng = np.random.default_rng(seed)
    rows = len(case.requests) + case.padding_rows
    query_len = np.zeros(rows, np.int32)
    context_len = np.zeros(rows, np.int32)
    query_len[: len(case.requests)] = [tokens for tokens, _ in case.requests]
    context_len[: len(case.requests)] = [context for _, context in case.requests]
    num_tokens = int(query_len.sum()) + case.padding_tokens
    query_start = (np.cumsum(query_len) - query_len).astype(np.int32)

    pages_per_row = -(-int(context_len.max()) // case.page_size) + 1
    num_pages = rows * pages_per_row
    page_table = rng.permutation(num_pages).astype(np.int32).reshape(rows, pages_per_row)
    shape = (num_pages, case.num_kv_heads, case.head_dim, case.page_size)
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    token = np.arange(pages_per_row * case.page_size).reshape(pages_per_row, 1, 1, case.page_size)
    for row in range(rows):
        unwritten = np.broadcast_to(token >= context_len[row], (pages_per_row, *shape[1:]))
        for pool in (k, v):
            pool[page_table[row]] = np.where(unwritten, np.nan, pool[page_table[row]])
    q = rng.standard_normal((num_tokens, case.num_heads, case.head_dim)).astype(np.float32)
    return Arrays(q, KVPages(k, v), page_table, query_start, query_len, context_len)  # type: ignore[arg-type]
