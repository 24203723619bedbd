"""The library of products: its form of a matrix, its results, its threads, and machines that cannot have it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from orca_jax.kernels import native as api
from orca_jax.kernels.native import Library
from tests.kernels.native.machine import library_of, needs_library
from tests.run.examples import holds_for

pytestmark = pytest.mark.usefixtures("quick_compiles")  # for all but the library

DTYPES = ["float32", "bfloat16"]


def numbers(shape: tuple[int, int], dtype: str, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def expected(x: jax.Array, matrix: jax.Array) -> np.ndarray:
    """The product in float64 of the numbers as the library reads them."""
    return np.asarray(x.astype(matrix.dtype), np.float64) @ np.asarray(matrix, np.float64)


def test_a_packed_matrix_by_hand() -> None:
    matrix = jnp.arange(8, dtype=jnp.float32).reshape(2, 4)  # 0 1 2 3 and 4 5 6 7
    assert api.pack(matrix, 2).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert api.pack(matrix.astype(jnp.bfloat16), 2).tolist() == [[[0, 4, 1, 5]], [[2, 6, 3, 7]]]


def unpacked(packed: jax.Array) -> jax.Array:
    """The matrix that was packed."""
    blocks, rows, size = packed.shape
    each = api.inputs_each(packed.dtype)
    parts = packed.reshape(blocks, rows, size // each, each).transpose(1, 3, 0, 2)
    return parts.reshape(rows * each, blocks * size // each)


@holds_for(
    20,
    pairs=st.integers(1, 5),
    blocks=st.integers(1, 4),
    width=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
)
def test_a_packed_matrix_has_all_numbers(pairs: int, blocks: int, width: int, dtype: str) -> None:
    matrix = numbers((2 * pairs, blocks * width), dtype)
    np.testing.assert_array_equal(unpacked(api.pack(matrix, width)), matrix)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [*range(1, 14), 25, 40])
def test_a_product_with_a_packed_matrix(rows: int, dtype: str) -> None:
    width = library_of().width
    x, matrix = numbers((rows, 38), "float32", 1), numbers((38, 3 * width), dtype)
    result = np.asarray(api.packed_product(x, api.pack(matrix, width)))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected(x, matrix), atol=1e-4)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_with_a_matrix_of_a_stack(dtype: str) -> None:
    width, x = library_of().width, numbers((5, 38), "float32", 1)
    matrices = [numbers((38, 2 * width), dtype, seed) for seed in range(3)]
    stack = api.pack(jnp.stack(matrices), width)
    multiply = jax.jit(
        lambda layer, rows=5: api.packed_product(x, api.Packed(stack, api.LayerRows(layer, rows)))
    )
    for layer, matrix in enumerate(matrices):
        np.testing.assert_array_equal(stack[layer], api.pack(matrix, width))
        np.testing.assert_array_equal(
            multiply(layer), api.packed_product(x, api.pack(matrix, width))
        )
    for layer, rows in ((-1, 5), (3, 5), (0, -1)):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="no such place"):
            multiply(layer, rows).block_until_ready()
    for rows in (0, 1, 4, 6):  # others are undefined
        np.testing.assert_array_equal(multiply(1, rows)[:rows], multiply(1)[:rows])


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_of_a_stack_with_their_own_rows(dtype: str) -> None:
    """Each result has the bits of a product of its own. Rows after those of all matrices are undefined."""
    width, x, sizes = library_of().width, numbers((20, 38), "float32", 1), (5, 0, 13, 1)
    stack = api.pack(jnp.stack([numbers((38, 2 * width), dtype, seed) for seed in range(6)]), width)

    @jax.jit
    def multiply(layer: int, sizes: tuple[int, ...]) -> jax.Array:
        return api.packed_products(
            x, [api.Packed(stack, api.LayerRows(jnp.int32(layer), jnp.array(sizes)))] * 2
        )[1]

    found = multiply(1, sizes)
    for index, size in enumerate(sizes):
        rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        if size:
            np.testing.assert_array_equal(
                found[rows], api.packed_product(x[rows], stack[1 + index])
            )
    np.testing.assert_array_equal(multiply(1, (5, 0, 13, 2**30))[:18], found[:18])
    for layer, wrong in ((3, sizes), (0, (3, -1, 4, 4))):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="no such place"):
            multiply(layer, wrong).block_until_ready()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_matrices_in_one_call(dtype: str) -> None:
    """Threads share the blocks of all of them. Each result has the bits of a call of its own."""
    width, x = library_of().width, numbers((5, 512), "float32", 1)
    stacks = [api.pack(numbers((512, n * width), dtype, n), width) for n in (9, 1, 4)]
    matrices = [api.in_stack(stack, 5) for stack in stacks]
    together = jax.jit(api.packed_products)(x, matrices)
    for found, matrix in zip(together, matrices, strict=True):
        np.testing.assert_array_equal(found, api.packed_product(x, matrix, devices=1000))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a call of products has"):
        jax.block_until_ready(api.packed_products(x, matrices * 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_a_packed_matrix(dtype: str) -> None:
    matrix, columns = numbers((6, 12), dtype), jnp.array([0, 3, 4, 11, 4])
    found = api.packed_columns(api.pack(matrix, 4), columns, 4)
    np.testing.assert_array_equal(found, matrix.T[columns].astype("float32"))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: str) -> None:
    """All bits are equal, so a schedule cannot change a token."""
    width = library_of().width
    x, packed = numbers((29, 96), "float32", 1), api.pack(numbers((96, 2 * width), dtype), width)
    together = np.asarray(api.packed_product(x, packed))
    for row in range(29):
        np.testing.assert_array_equal(
            np.asarray(api.packed_product(x[row : row + 1], packed))[0], together[row]
        )


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_a_large_product(dtype: str) -> None:
    """With one device the other threads of XLA's pool help; with as many devices as threads none does."""
    width = library_of().width
    x, matrix = numbers((17, 512), "float32", 1), numbers((512, 16 * width), dtype)
    packed = api.pack(matrix, width)
    alone = np.asarray(api.packed_product(x, packed, devices=1000))
    np.testing.assert_allclose(alone, expected(x, matrix), atol=1e-3)
    multiply = jax.jit(api.packed_product)
    for _ in range(200):
        np.testing.assert_array_equal(np.asarray(multiply(x, packed)), alone)


@needs_library
def test_shapes_that_do_not_fit_are_refused() -> None:
    width = library_of().width
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not fit"):
        api.packed_product(jnp.ones((1, 7)), jnp.ones((2, 8, width))).block_until_ready()


def test_the_shapes_of_the_library() -> None:
    wide = Library(32)
    single, half = jnp.dtype("float32"), jnp.dtype("bfloat16")
    assert api.can_pack(wide, 7, 64, single) and not api.can_pack(wide, 7, 48, single)
    assert api.can_pack(wide, 8, 64, half) and not api.can_pack(wide, 7, 64, half)
    assert not api.can_pack(wide, 8, 64, jnp.dtype("float16"))
