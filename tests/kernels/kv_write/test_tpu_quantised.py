"""The TPU kernel for writing quantised pages, run by Pallas' interpreters and compared with `pages`."""

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import RowArrays, TokenMajorPages, slots
from orca_jax.kernels.kv_write import tpu_quantised, write_kv
from orca_jax.kernels.kv_write.pieces import cut
from orca_jax.kernels.kv_write.tpu_quantised import write_quantised
from orca_jax.kernels.ragged_attention.cases import Arrays, Case, make_arrays
from tests.covering import chosen, slow
from tests.kernels.strictly import strictly

# Increments in the first and last slot of a page and of a group; chunks that begin and end anywhere and fill pages.
# interpreted kernels are not the programs that users run
pytestmark = pytest.mark.usefixtures("quick_compiles")
REQUESTS = (
    (1, 1),
    (1, 9),
    (1, 64),
    (1, 65),
    (1, 33),
    (1, 100),
    (2, 17),
    (5, 37),
    (70, 130),
    (64, 64),
    (40, 203),
)
HEADS = [(2, 64, 64), (25, 64, 32), (3, 80, 32), (2, 96, 64), (1, 256, 128)]
# Magnitudes of new tokens: always within the scales of a case's pages, sometimes, and never.
SIZES = {"int8": (0.5, 1.2, 9.0), "float8_e4m3fn": (0.5, 4.5, 99.0)}


def case_of(
    dtype: Any, heads: tuple[int, int, int], requests: tuple[tuple[int, int], ...] = REQUESTS
) -> Case:
    count, dim, size = heads
    return Case(
        "", requests, count, count, dim, size, padding_tokens=3, padding_rows=2, page_dtype=dtype
    )


def new_tokens(case: Case, arrays: Arrays, size: float, dtype: Any) -> list[jax.Array]:
    rng = np.random.default_rng(7)
    shape = (arrays.q.shape[0], case.num_kv_heads, case.head_dim)
    return [jnp.asarray(size * rng.standard_normal(shape), dtype) for _ in range(2)]


def check(case: Case, size: float, interpret: Any, dtype: Any = jnp.float32) -> tuple[int, int]:
    """Compare with `pages`, bit by bit.

    Returns the number of pages with old tokens and unchanged scales, and the number of pages with a larger scale.
    """
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, layout="token_major"))
    pages, new = arrays.pages, new_tokens(case, arrays, size, dtype)
    assert isinstance(pages, TokenMajorPages)
    write = jax.jit(partial(write_quantised, head_dim=case.head_dim, interpret=interpret))
    count, pieces = cut(case.page_size, new[0].shape[0], arrays.requests)
    # The pages of this layer begin at page 2.
    of_layer = pieces._replace(page=pieces.page - 2, first_page=jnp.array([2]))
    actual = write(pages, slots(*new, new[0].dtype), count, of_layer)
    wanted = jax.jit(write_kv)(pages, *new, arrays.requests)
    written, kept = [], 0
    for page, begin, end in zip(*(x[: int(count)].tolist() for x in pieces[:3]), strict=True):
        np.testing.assert_array_equal(bits(actual)[page, :end], bits(wanted)[page, :end])
        np.testing.assert_array_equal(actual.scale[page], wanted.scale[page])
        written.append(page)
        kept += begin > 0 and bool((actual.scale[page] == pages.scale[page]).all())
    others = np.setdiff1d(np.arange(pages.kv.shape[0]), written)
    np.testing.assert_array_equal(bits(actual)[others], bits(pages)[others])
    np.testing.assert_array_equal(actual.scale[others], pages.scale[others])
    return kept, int((pieces.begin[: int(count)] > 0).sum()) - kept


def bits(pages: TokenMajorPages) -> np.ndarray:
    return np.asarray(pages.kv).view(np.uint8)


def check_strictly(case: Case, size: float) -> tuple[int, int]:
    with strictly() as interpret:
        return check(case, size, interpret)


@pytest.mark.parametrize("dtype", ["int8", slow("float8_e4m3fn")])
def test_pages_that_keep_their_scales_and_pages_that_do_not(dtype: str) -> None:
    kept, grown = check_strictly(case_of(dtype, HEADS[0]), SIZES[dtype][1])
    assert kept and grown


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "heads"), chosen(product(SIZES, HEADS[1:]), size=1), ids=str)
def test_heads_without_races(dtype: str, heads: tuple[int, int, int]) -> None:
    check_strictly(case_of(dtype, heads), SIZES[dtype][1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SIZES)
def test_new_tokens_in_bfloat16_that_all_fit_or_of_which_none_does(dtype: str) -> None:
    case = case_of(dtype, HEADS[0])
    kept, grown = (check(case, size, True, jnp.bfloat16) for size in SIZES[dtype][::2])
    assert kept[1] == grown[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("requests", [((1, 1),), ((3, 3),), ((1, 64),) * 9, ((130, 130),)], ids=str)
def test_batches_without_races(requests: tuple[tuple[int, int], ...]) -> None:
    """Fewer pieces than buffers, and more."""
    check_strictly(case_of("int8", HEADS[0], requests), SIZES["int8"][1])


@pytest.mark.slow
def test_wide_pages_of_which_two_fit_without_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu_quantised, "_BUFFER_BYTES", 0)
    _, grown = check_strictly(case_of("int8", HEADS[0]), SIZES["int8"][1])
    assert grown


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SIZES)
def test_iterations_that_follow_each_other(dtype: str) -> None:
    """Write many random iterations, as an engine does: the pages equal those written by `pages`."""
    rng, rows, tokens, size = np.random.default_rng(5), 6, 96, 64
    case = case_of(dtype, HEADS[0], ((1, 4 * size),) * rows)
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, layout="token_major"))
    actual = wanted = TokenMajorPages(arrays.pages.kv, jnp.full_like(arrays.pages.scale, np.nan))
    ways = write_kv, partial(write_quantised, head_dim=64, interpret=True)
    at_once, kernel = (jax.jit(way) for way in ways)
    context, grown = np.zeros(rows, np.int32), 0
    for _ in range(40):
        added = np.minimum(
            rng.choice([0, 1, 1, 1, 2, 7, 31], rows) * rng.choice([1, 1, 2], rows),
            4 * size - context,
        )
        order = np.lexsort((rng.random(rows), np.select([added == 1, added > 1], [0, 1], 2)))
        query_len, context = added[order].astype(np.int32), context + added.astype(np.int32)
        query_len[np.cumsum(query_len) > tokens] = 0
        context[order] -= added[order] - query_len
        start = (np.cumsum(query_len) - query_len).astype(np.int32)
        table = np.asarray(arrays.requests.page_table)[order]
        batch = RowArrays(*(jnp.asarray(x) for x in (table, start, query_len, context[order])))
        k, v = (
            jnp.asarray(rng.standard_normal((tokens, 2, 64)) * rng.choice([1, 3]), jnp.float32)
            for _ in range(2)
        )
        before, wanted = wanted, at_once(wanted, k, v, batch)
        actual = kernel(actual, slots(k, v, k.dtype), *cut(size, tokens, batch))
        for row, page in ((r, p) for r in range(rows) for p in range(-(-context[r] // size))):
            index, end = arrays.requests.page_table[row, page], context[row] - page * size
            np.testing.assert_array_equal(bits(actual)[index, :end], bits(wanted)[index, :end])
            np.testing.assert_array_equal(actual.scale[index], wanted.scale[index])
            grown += bool((wanted.scale[index] > before.scale[index]).any())
    assert grown
