"""The implementations of `write_kv`, in every layout, on the cases of attention and on small examples."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import (
    HeadMajorPages,
    KVPages,
    RowArrays,
    TokenMajorPages,
    largest_stored,
    page_tokens,
    pages_shape,
    scales_of,
)
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention.cases import CASES, Arrays, Case, make_arrays
from orca_jax.values.config import PageLayout
from tests.covering import covering

pytestmark = pytest.mark.usefixtures("quick_compiles")  # copies and roundings have the same bits
IMPLEMENTATIONS = ["scatter", "blocks"]
SHORT = [case for case in CASES if case.head_dim == 16 and case.page_dtype == "float32"]
MIXED = [
    case for case in SHORT if case.name in ("increments and chunks with padding", "sliding window")
]
WRITES = [("head_major", way, case) for way in IMPLEMENTATIONS for case in SHORT]
WRITES += [("head_major", "pages", case) for case in SHORT]
WRITES += [("token_major", "scatter", case) for case in MIXED]
QUANTISED = [case for case in CASES if case.page_dtype in ("int8", "float8_e4m3fn")]


def new_tokens(case: Case, arrays: Arrays) -> list[np.ndarray]:
    """New keys and values `[T, K, D]` of an iteration."""
    rng = np.random.default_rng(7)
    shape = (arrays.q.shape[0], case.num_kv_heads, case.head_dim)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]


@pytest.mark.parametrize(
    ("case", "implementation"),
    covering(
        [
            *((case, way) for way in (*IMPLEMENTATIONS, "pages") for case in MIXED),
            *((QUANTISED[0], way) for way in ("blocks", "pages")),
        ],
        size=1,
    ),
    ids=lambda x: x.name if isinstance(x, Case) else x,
)
def test_pages_without_values_get_keys_alone(case: Case, implementation: str) -> None:
    arrays = make_arrays(case)
    assert isinstance(arrays.pages, HeadMajorPages)
    k, v = new_tokens(case, arrays)
    write = jax.jit(lambda *args: write_kv(*args, implementation=implementation))
    one = arrays.pages._replace(v=None, v_scale=None)
    alone, both = (
        write(*jax.tree.map(jnp.asarray, (pages, k, values, arrays.requests)))
        for pages, values in ((one, None), (arrays.pages, v))
    )
    assert alone.v is None and alone.v_scale is None
    np.testing.assert_array_equal(alone.k, both.k)
    assert (alone.k_scale is None) == (both.k_scale is None)
    if both.k_scale is not None:
        np.testing.assert_array_equal(alone.k_scale, both.k_scale)


def row_arrays(*lists: object) -> RowArrays:
    return RowArrays(*(jnp.asarray(each, jnp.int32) for each in lists))


def written(arrays: Arrays, new: list[np.ndarray], implementation: str | None) -> KVPages:
    write = jax.jit(lambda *args: write_kv(*args, implementation=implementation))
    pages: KVPages = write(*jax.tree.map(jnp.asarray, (arrays.pages, *new, arrays.requests)))
    return pages


def slots(pages: KVPages, head_dim: int) -> list[np.ndarray]:
    """Keys and values `[slots, K, D]` of all pages in order, as a copy."""
    pages = jax.tree.map(jnp.asarray, pages)
    num_pages = jax.tree.leaves(pages)[0].shape[0]
    return [
        np.array(x)
        for x in jax.jit(page_tokens, static_argnums=2)(pages, np.arange(num_pages), head_dim)
    ]


def expected_slots(case: Case, arrays: Arrays, new: list[np.ndarray]) -> list[np.ndarray]:
    """The slots after the new tokens are written one by one."""
    expected = slots(arrays.pages, case.head_dim)
    for row, (count, context) in enumerate(case.requests):
        for i in range(count):
            index, slot = divmod(context - count + i, case.page_size)
            for pool, tokens in zip(expected, new, strict=True):
                pool[arrays.requests.page_table[row, index] * case.page_size + slot] = tokens[
                    arrays.requests.query_start[row] + i
                ]
    return expected


@pytest.mark.parametrize(
    ("layout", "implementation", "case"),
    covering(WRITES, lambda each: (each[:2], each[2]), size=1),
    ids=lambda x: x.name if isinstance(x, Case) else x,
)
def test_every_token_lands_in_its_slot_and_nothing_else_changes(
    case: Case, implementation: str, layout: PageLayout
) -> None:
    arrays = make_arrays(case, layout=layout)
    new = new_tokens(case, arrays)
    actual = slots(written(arrays, new, implementation), case.head_dim)
    for pool, wanted in zip(actual, expected_slots(case, arrays, new), strict=True):
        np.testing.assert_array_equal(pool, wanted)


@pytest.mark.parametrize(
    ("layout", "implementation", "case"),
    [
        ("head_major", None, QUANTISED[0]),
        ("head_major", "pages", QUANTISED[0]),
        ("token_major", None, QUANTISED[1]),
    ],
)
def test_quantised_pages_keep_old_tokens_and_take_new_ones(
    case: Case, implementation: str | None, layout: PageLayout
) -> None:
    arrays = make_arrays(case, layout=layout)
    new = new_tokens(case, arrays)
    actual = slots(written(arrays, new, implementation), case.head_dim)
    expected = expected_slots(case, arrays, new)
    rows = zip(arrays.requests.page_table, arrays.requests.context_len, strict=True)
    for table, context in rows:
        positions = (table[:, None] * case.page_size + np.arange(case.page_size)).reshape(-1)[
            :context
        ]
        for pool, wanted in zip(actual, expected, strict=True):
            # int8 has 127 steps up to the largest value of a page, about 5 here; fp8 has a mantissa of 3 bits.
            np.testing.assert_allclose(pool[positions], wanted[positions], atol=0.04, rtol=0.07)


def test_a_token_of_a_head_major_page_depends_on_nothing_else() -> None:
    """Chunks and increments, with larger tokens before and after, store the same bits and scales."""
    case = Case("", ((5, 5),), 2, 2, 16, 8, page_dtype="int8")
    arrays = make_arrays(case)
    sizes = np.array([1.0, 3.0, 0.1, 0.0, 9.0])[:, None, None]
    k, v = (tokens * sizes for tokens in new_tokens(case, arrays))
    page = arrays.requests.page_table[0, 0]
    write, stored = jax.jit(write_kv), []
    for cuts in ((0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)):
        pages: KVPages = jax.tree.map(jnp.asarray, arrays.pages)
        for start, end in pairwise(cuts):
            requests = row_arrays(arrays.requests.page_table, [0], [end - start], [end])
            pages = write(pages, jnp.asarray(k[start:end]), jnp.asarray(v[start:end]), requests)
        stored.append([np.asarray(pool)[page, ..., :5] for pool in jax.tree.leaves(pages)])
    for other in stored[1:]:
        for one, two in zip(stored[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
    assert (np.abs(stored[0][0]).max(axis=1)[:, [0, 1, 2, 4]] == 127).all(), (
        "each token uses the whole range"
    )


def test_packed_values_keep_their_bits_until_a_larger_one_comes() -> None:
    pages, write = (
        TokenMajorPages(jnp.full((1, 4, 2), 99, jnp.int8), jnp.ones((1, 1, 2))),
        jax.jit(write_kv),
    )
    for position, value in enumerate([12.7, 1.0, 25.4]):
        token = jnp.full((1, 1, 1), value)
        written = write(pages, token, token, row_arrays([[0]], [0], [1], [position + 1]))
        assert isinstance(written, TokenMajorPages)
        pages = written
        stored = [[127], [127, 10], [64, 5, 127]][position]
        assert np.asarray(pages.kv)[0, : position + 1, 0].tolist() == stored
    np.testing.assert_allclose(pages.scale, [[[0.2, 0.2]]])


def test_a_full_page_that_is_read_does_not_raise_its_scale() -> None:
    dtype = jnp.dtype("float8_e4m3fn")
    scales = jnp.asarray(np.random.default_rng(0).uniform(0.02, 0.04, 1000), jnp.float32)
    largest = largest_stored(dtype) * scales
    np.testing.assert_array_equal(scales_of(largest, scales, dtype), scales)
    assert (largest / largest_stored(dtype) > scales).any(), "what it guards against"


def test_pages_are_for_token_major_pages_only_if_these_are_quantised() -> None:
    case = MIXED[0]
    arrays = make_arrays(case, layout="token_major")
    with pytest.raises(NotImplementedError, match="token-major pages that are quantised"):
        written(arrays, new_tokens(case, arrays), "pages")


def test_scatter_refuses_quantised_pages() -> None:
    case = QUANTISED[0]
    arrays = make_arrays(case)
    with pytest.raises(NotImplementedError, match="'blocks' and 'pages' write"):
        written(arrays, new_tokens(case, arrays), "scatter")


def test_values_are_cast_to_the_pages() -> None:
    pages = HeadMajorPages(*(jnp.zeros((2, 1, 4, 8), jnp.bfloat16) for _ in range(2)))
    one = jnp.ones((1, 1, 4))
    out = jax.jit(write_kv)(pages, one, 2 * one, row_arrays([[1]], [0], [1], [3]))
    assert isinstance(out, HeadMajorPages)
    assert out.v.dtype == jnp.bfloat16
    assert np.asarray(out.v, np.float32)[1, 0, :, 2].tolist() == [2.0] * 4


def test_an_unknown_implementation_is_named() -> None:
    pages = HeadMajorPages(*(jnp.zeros((2, 1, 4, 8)) for _ in range(2)))
    one = jnp.ones((1, 1, 4))
    with pytest.raises(NotImplementedError, match="'fast'"):
        write_kv(pages, one, one, row_arrays([[1]], [0], [1], [3]), implementation="fast")


@pytest.mark.parametrize("page_dtype", ["int8", "float8_e4m3fn"])
def test_a_write_to_head_major_pages_converts_no_other_page(page_dtype: str) -> None:
    """XLA:CPU writes to an array of 8-bit floats by converting all of it to a wider type, and back."""
    pages = pages_shape("head_major", 37, 1, 4, 8, jnp.dtype(page_dtype))
    token, row = jax.ShapeDtypeStruct((2, 1, 4), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    requests = RowArrays(jax.ShapeDtypeStruct((2, 3), jnp.int32), row, row, row)
    program = (
        jax.jit(write_kv, donate_argnums=0).lower(pages, token, token, requests).compile().as_text()
    )
    assert "[37,1,4,8]" in program
    assert not [
        kind for kind in ("f32", "f16", "bf16", "f8e4m3fn") if f"{kind}[37,1,4,8]" in program
    ]
