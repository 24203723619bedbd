"""Products with matrices of few bits: their packed form, and the library against the reference."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from orca_jax.helpers.processor import all_cpu_flags
from orca_jax.kernels import native as api
from orca_jax.kernels.native import FewBits, Library
from orca_jax.kernels.native.few_bits import shifts
from tests.covering import covering, slow
from tests.kernels.native.machine import SANITIZED, library_of, needs_library, run_cases

pytestmark = pytest.mark.usefixtures("quick_compiles")  # for all but the library
FLOAT32, BFLOAT16, INT8 = jnp.dtype("float32"), jnp.dtype("bfloat16"), jnp.dtype("int8")
FORMS = pytest.mark.parametrize(
    "dtype", [FLOAT32, BFLOAT16, INT8], ids=["float32", "16 bits", "8 bits"]
)
ERRORS = {FLOAT32: 5e-7, BFLOAT16: 1e-5, INT8: 2e-3}
"""The largest error of a product, relative to the root of the sum of squares of its terms' bounds; see `error`."""
IN_FLOAT16 = 2.5e-4  # with sums of 16 products in float16; with activations in bfloat16 it is 4e-4


# One program for each shape, and not one for each of their operations:
pack_bits = jax.jit(api.pack_bits, static_argnums=(1, 2))
unpack_columns = jax.jit(api.unpack_columns)
dequantised = jax.jit(FewBits.dequantised)


def matrix(
    inputs: int,
    outputs: int,
    group: int,
    bits: int,
    *,
    has_minima: bool = False,
    is_ordered: bool = False,
    dtype: str = "float32",
) -> FewBits:
    """A random matrix with scales and minima of a type."""
    draw = np.random.default_rng(inputs * outputs + group + bits)
    half, groups = 1 << (bits - 1), (inputs // group, outputs)
    low, high = (0, 2 * half) if has_minima else (-half, half)
    return FewBits(
        jnp.asarray(draw.integers(low, high, (inputs, outputs)), jnp.int16),
        jnp.asarray(draw.uniform(0.5, 2, groups) * draw.choice([-1, 1], groups) / half, dtype),
        bits,
        jnp.asarray(draw.standard_normal(groups), dtype) if has_minima else None,
        jnp.asarray(draw.permutation(inputs)) if is_ordered else None,
    )


def floats(inputs: int, outputs: int, group: int) -> FewBits:
    """A matrix of all numbers of e4m3 but NaN, with scales."""
    draw = np.random.default_rng(inputs * outputs + group)
    codes = draw.permuted(np.resize(np.arange(256, dtype=np.uint8), inputs * outputs))
    codes[(codes & 0x7F) == 0x7F] = 0
    values = codes.reshape(inputs, outputs).view(ml_dtypes.float8_e4m3fn)
    scales = draw.uniform(0.5, 2, (inputs // group, outputs)).astype(np.float32)
    return FewBits(jnp.asarray(values), jnp.asarray(scales), 8, is_float=True)


def activations(rows: int, inputs: int) -> jax.Array:
    """Rows of very different sizes, with some zeros."""
    draw = np.random.default_rng(rows)
    x = draw.standard_normal((rows, inputs)) * 10.0 ** draw.uniform(-3, 3, (rows, 1))
    x[:, :3] = 0
    return jnp.asarray(x, jnp.float32)


def multiply(x: jax.Array, held: FewBits, dtype: jnp.dtype, devices: int = 1) -> np.ndarray:
    packed = pack_bits(held, library_of().width)
    return np.asarray(
        jax.jit(api.few_bits_product, static_argnums=(2, 3))(x, packed, dtype, devices)
    )


def error(found: np.ndarray, x: jax.Array, held: FewBits) -> float:
    """The largest difference to the product in float64, relative to the sizes of its row and column."""
    wide = np.asarray(x, np.float64)[
        :, slice(None) if held.order is None else np.asarray(held.order)
    ]
    entries = np.asarray(dequantised(held), np.float64)
    sizes = np.linalg.norm(wide, axis=1)[:, None] * np.linalg.norm(entries, axis=0)
    return float((np.abs(found - wide @ entries) / sizes).max())


def test_a_packed_matrix_by_hand() -> None:
    """Eight inputs of a column are a word of 4 bits; the even ones are in its low half."""
    column = np.arange(-8, 0, dtype=np.int32)[:, None]
    held = FewBits(
        np.concatenate([column, column + 8], axis=1), np.array([[1.0, 2.0]], np.float32), 4
    )
    packed = pack_bits(held, 2)
    assert [[f"{word:08x}" for word in row] for row in packed.words[0].tolist()] == [
        ["75316420", "fdb9eca8"]
    ]
    assert packed.scales.tolist() == [[[1, 2]]]
    assert shifts(8).tolist() == [0, 16, 8, 24]


@pytest.mark.parametrize(
    ("bits", "groups", "blocks", "group", "splits"),
    [
        (4, 3, 2, 32, 1),
        *(slow(*each) for each in ((5, 2, 1, 64, 1), (6, 2, 1, 32, 1))),
        (8, 3, 1, 128, 2),
    ],
)
def test_a_packed_matrix_has_all_numbers(
    bits: int, groups: int, blocks: int, group: int, splits: int
) -> None:
    held = matrix(groups * group * splits, 4 * blocks, group, bits)
    packed = pack_bits(held, 4, splits)
    scales = np.asarray(packed.scales)
    ones = replace(packed, scales=np.ones_like(scales[:, :1]))
    np.testing.assert_array_equal(
        np.asarray(unpack_columns(ones, np.arange(4 * blocks))).T, held.values
    )
    np.testing.assert_array_equal(
        scales.repeat(held.values.shape[0] // scales.shape[1], axis=1)
        .transpose(1, 0, 2)
        .reshape(-1, 4 * blocks),
        np.asarray(held.scales).repeat(held.values.shape[0] // held.scales.shape[0], axis=0),
    )


def test_the_shapes_of_the_library() -> None:
    """Groups on the edge of a device become smaller ones; a single group has the inputs of all devices."""
    wide = Library(32)
    assert api.can_pack_bits(wide, 2816, 64, 22) and not api.can_pack_bits(wide, 2816, 48, 22)
    assert api.can_pack_bits(wide, 384, 32, 3, 2) and not api.can_pack_bits(wide, 384, 32, 3, 8)
    assert api.can_pack_bits(wide, 96, 32, 1) and not api.can_pack_bits(wide, 48, 32, 1)

    def scales_of(held: FewBits, splits: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = jax.eval_shape(
            lambda held: api.pack_bits(held, 4, splits), held
        ).scales.shape
        return shape

    assert scales_of(matrix(384, 4, 128, 4), 2) == (1, 6, 4)
    assert scales_of(matrix(384, 4, 384, 8), 2) == (1, 1, 4)
    assert scales_of(matrix(512, 4, 256, 8), 1) == (1, 4, 4)


SHAPES = (
    (32, 4),
    (64, 4),
    (128, 4),
    (None, 4),
    (32, 5),
    (64, 6),
    (32, 8),
    (64, 8),
    (128, 8),
    (None, 8),
)


@needs_library
@pytest.mark.parametrize(
    ("group", "bits", "dtype"),
    covering([(*shape, dtype) for shape in SHAPES for dtype in (FLOAT32, BFLOAT16)], size=1),
)
def test_a_product(group: int | None, bits: int, dtype: jnp.dtype) -> None:
    """All numbers of rows have one program each, and share the matrix. Blocks are an odd number."""
    held = matrix(384, 3 * library_of().width, group or 384, bits)
    for rows in (1, 3, 5, 13, 64, 241):
        x = activations(rows, 384)
        assert error(multiply(x, held, dtype), x, held) < ERRORS[dtype]


@needs_library
@pytest.mark.parametrize("group", [32, 128, 384])
def test_floats_of_8_bits(group: int) -> None:
    """Both forms, and the library has activations of 16 bits only where the processor multiplies them."""
    held = floats(384, 3 * library_of().width, group)
    unpacked = unpack_columns(pack_bits(held, 4), jnp.arange(9))
    np.testing.assert_array_equal(unpacked, np.asarray(dequantised(held)).T[:9])
    for rows in (1, 3, 6, 7, 64, 241):
        x = activations(rows, 384)
        assert error(multiply(x, held, FLOAT32), x, held) < ERRORS[FLOAT32]
        narrow = x
        limit = ERRORS[FLOAT32]
        if "avx512_fp16" in all_cpu_flags():
            limit = IN_FLOAT16
        elif "avx512_bf16" in all_cpu_flags():
            narrow = x.astype(jnp.bfloat16).astype(jnp.float32)
        for dtype in (BFLOAT16, INT8):
            assert error(multiply(x, held, dtype), narrow, held) < limit


@needs_library
@pytest.mark.parametrize("power", [-90, -20, 0, 20, 60])
def test_floats_by_activations_of_any_size(power: int) -> None:
    """Groups of a row differ by 2^20. Zeros stay zeros, and what is not finite is seen in its row alone."""
    held = floats(384, library_of().width, 128)
    factors = jnp.repeat(jnp.tile(jnp.array([1.0, 2.0**-20]), 6), 32)
    x = activations(4, 384) * 2.0**power * factors
    x = x.at[1].set(0).at[2, 40].set(jnp.inf).at[3, 7].set(jnp.nan)
    found = np.asarray(multiply(x, held, BFLOAT16))
    assert error(found[:1], x[:1], held) < 1e-3
    assert (found[1] == 0).all()
    assert not np.isfinite(found[2:]).any()


@needs_library
@FORMS
def test_floats_beside_integers_and_in_stacks(dtype: jnp.dtype) -> None:
    """Each result has the bits of a call of its own, also of rows alone."""
    width = library_of().width
    held = floats(256, 2 * width, 128)
    other = matrix(256, width, 64, 4)
    x = activations(14, 256)
    both = [pack_bits(each, width) for each in (held, other)]
    found, beside = jax.jit(api.few_bits_products, static_argnums=2)(x, both, dtype)
    np.testing.assert_array_equal(found, multiply(x, held, dtype))
    np.testing.assert_array_equal(beside, multiply(x, other, dtype))
    np.testing.assert_array_equal(multiply(x[5:7], held, dtype), np.asarray(found)[5:7])
    stack = jax.tree.map(lambda array: jnp.stack([array, array]), both[0])
    placed = replace(stack, place=api.LayerRows(jnp.int32(0), jnp.array([4, 10])))
    (of_experts,) = jax.jit(api.few_bits_products, static_argnums=2)(x, [placed], dtype)
    np.testing.assert_array_equal(of_experts, found)


@needs_library
@pytest.mark.parametrize(
    ("bits", "has_minima"), [(4, False), (4, True), (5, False), (6, False), (8, False), (8, True)]
)
def test_activations_of_8_bits(bits: int, has_minima: bool) -> None:
    """The product with rounded activations, by each number of rows."""
    held = matrix(384, 3 * library_of().width, 32, bits, has_minima=has_minima)
    for rows in (1, 3, 6, 13, 241):
        x = activations(rows, 384)
        groups = np.asarray(x).reshape(rows, -1, 32)
        top = np.abs(groups).max(axis=2, keepdims=True)
        rounded = (np.rint(groups * (127 / top)) * (top / 127)).reshape(rows, -1)
        found = multiply(x, held, INT8)
        assert (
            error(found, jnp.asarray(rounded), held) < 1e-6 < error(found, x, held) < ERRORS[INT8]
        )


@needs_library
@FORMS
@pytest.mark.parametrize(("bits", "kind"), [(4, "float16"), (5, "float16"), (8, "float32")])
def test_minima_and_an_order(bits: int, kind: str, dtype: jnp.dtype) -> None:
    held = matrix(192, library_of().width, 64, bits, has_minima=True, is_ordered=True, dtype=kind)
    for rows in (2, 30):
        x = activations(rows, 192)
        assert error(multiply(x, held, dtype), x, held) < ERRORS[dtype]
        assert error(np.asarray(jax.jit(FewBits.product)(held, x)), x, held) < ERRORS[FLOAT32]


@needs_library
@FORMS
@pytest.mark.parametrize("is_ordered", [False, True])
def test_several_matrices_in_one_call(is_ordered: bool, dtype: jnp.dtype) -> None:
    """They have different sizes, groups and bits, and each result has the bits of a call of its own."""
    width, x = library_of().width, activations(6, 256)
    held = [
        matrix(256, 3 * width, 64, 4),
        matrix(256, width, 32, 8, has_minima=True, is_ordered=is_ordered),
        matrix(256, 2 * width, 256, 8),
    ]
    packed = [pack_bits(each, width) for each in held]
    together = jax.jit(api.few_bits_products, static_argnums=2)(x, packed, dtype)
    for each, found in zip(held, together, strict=True):
        np.testing.assert_array_equal(found, multiply(x, each, dtype))


@needs_library
@FORMS
@pytest.mark.parametrize(("bits", "has_minima"), [(4, False), (5, True), (8, False)])
def test_matrices_of_a_stack_with_their_own_rows(
    bits: int, has_minima: bool, dtype: jnp.dtype
) -> None:
    """Each result has the bits of a product of its own."""
    width, sizes, x = library_of().width, (0, 4, 130, 1), activations(140, 192)
    first = matrix(192, 2 * width, 64, bits, has_minima=has_minima)
    held = [
        replace(first, values=jnp.roll(first.values, n), scales=first.scales * (n + 1))
        for n in range(5)
    ]
    packed = [api.pack_bits(each, width) for each in held]
    stack = jax.tree.map(lambda *arrays: jnp.stack(arrays), *packed)
    placed = replace(stack, place=api.LayerRows(jnp.int32(1), jnp.array(sizes)))
    found = jax.jit(api.few_bits_products, static_argnums=2)(x, [placed, placed], dtype)[1]
    for index, size in enumerate(sizes):
        rows = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        if size:
            np.testing.assert_array_equal(found[rows], multiply(x[rows], held[1 + index], dtype))


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 288])
def test_float32_has_the_bits_of_plain_matrices(group: int, bits: int) -> None:
    width = library_of().width
    held, x = matrix(288, 2 * width, group, bits), activations(17, 288)
    plain = api.packed_product(x, jax.jit(api.pack, static_argnums=1)(dequantised(held), width))
    np.testing.assert_array_equal(multiply(x, held, FLOAT32), plain)


@needs_library
@FORMS
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_others(bits: int, dtype: jnp.dtype) -> None:
    """All bits are equal, however the rows are cut into tiles and panels, and whichever threads help."""
    for group in (64, 320):
        held, x = matrix(320, 2 * library_of().width, group, bits), activations(130, 320)
        together = multiply(x, held, dtype)
        for rows in (1, 2, 7, 24):
            some = jnp.asarray(np.asarray(x)[5 : 5 + rows])
            np.testing.assert_array_equal(multiply(some, held, dtype), together[5 : 5 + rows])
        np.testing.assert_array_equal(multiply(x, held, dtype, 1000), together)
        packed = pack_bits(held, library_of().width)
        for rows in (0, 1, 25, 131):  # others are undefined
            first = np.asarray(api.few_bits_product(x, api.bits_in_stack(packed, rows), dtype))
            np.testing.assert_array_equal(first[:rows], together[:rows])


@needs_library
def test_threads_share_a_large_product() -> None:
    held, x = matrix(1024, 24 * library_of().width, 128, 8), activations(17, 1024)
    alone = multiply(x, held, BFLOAT16, 1000)
    packed = pack_bits(held, library_of().width)
    shared = jax.jit(api.few_bits_product, static_argnums=2)
    for _ in range(100):
        np.testing.assert_array_equal(shared(x, packed, BFLOAT16), alone)


@needs_library
@FORMS
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(wrong: float, dtype: jnp.dtype) -> None:
    """They reach all results of their row, or of their column, and no other ones."""
    held = matrix(64, 2 * library_of().width, 32, 4)
    x = np.array(activations(9, 64))
    x[4, 40] = wrong
    lost = ~np.isfinite(multiply(jnp.asarray(x), held, dtype))
    np.testing.assert_array_equal(lost.all(axis=1), np.arange(9) == 4)
    assert lost[4].all() and lost.sum() == lost.shape[1]
    scales = np.array(held.scales)
    scales[1, 5] = wrong
    broken = replace(held, scales=jnp.asarray(scales))
    lost = ~np.isfinite(multiply(activations(9, 64), broken, dtype))
    np.testing.assert_array_equal(lost, np.arange(lost.shape[1])[None] == np.full((9, 1), 5))


@needs_library
def test_sizes_at_the_ends_of_float32() -> None:
    """Very small groups count as zeros. Large ones do not overflow."""
    held = matrix(32, library_of().width, 32, 8)
    x = jnp.asarray(np.array([1e-38, 1e33, 0])[:, None].repeat(32, axis=1), jnp.float32)
    found = multiply(x, held, BFLOAT16)
    assert np.abs(found[0]).max() < 1e-25 and not found[2].any()
    assert error(found[1:2], x[1:2], held) < ERRORS[BFLOAT16]


@needs_library
def test_shapes_that_do_not_fit_are_refused() -> None:
    width, x = library_of().width, jnp.ones((1, 64))
    good = pack_bits(matrix(64, width, 32, 4), width)
    half = good.scales.astype(jnp.float16)
    wrong = replace(good, scales=jnp.ones((1, 3, width))), replace(good, minima=good.scales[:, :1])
    for packed in (
        *wrong,
        replace(good, minima=half),
        replace(good, scales=good.scales.astype(jnp.int32)),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="of few bits do not fit"):
            api.few_bits_product(x, packed, FLOAT32).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="of few bits do not fit"):
        api.few_bits_product(x, api.bits_in_stack(good, -1), FLOAT32).block_until_ready()
    for packed in (replace(good, words=good.words[:, :4]), replace(good, bits=8)):
        with pytest.raises(AssertionError, match="words of a column cannot hold 64 inputs of"):
            api.few_bits_product(x, packed, FLOAT32)


def test_columns_are_entries_of_the_matrix() -> None:
    for has_minima in (False, True):
        held = matrix(64, 8, 32, 4, has_minima=has_minima, dtype="float16")
        found = unpack_columns(pack_bits(held, 4), jnp.array([6, 1]))
        np.testing.assert_array_equal(found, np.asarray(dequantised(held)).T[[6, 1]])


@needs_library
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("-march=haswell", "-O1"), id="AVX2"),
        slow(("-march=native", *SANITIZED), id="sanitizers"),
        slow(("-march=haswell", *SANITIZED), id="AVX2, sanitizers"),
        slow(("-march=skylake-avx512", "-mno-avx512bw", *SANITIZED), id="no VNNI"),
    ],
)
def test_random_products_in_c(options: tuple[str, ...], tmp_path: Path) -> None:
    """Also with the instructions of other processors, and with arrays that end where those of a product do."""
    if "-march=skylake-avx512" in options and "avx512f" not in all_cpu_flags():
        pytest.skip("needs AVX-512")
    run_cases("few_bits_cases.c", options, tmp_path)
