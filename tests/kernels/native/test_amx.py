"""Packed products with AMX: by instructions in plain C on every machine, and compiled for processors that have it."""

import ctypes
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.helpers.processor import all_cpu_flags
from orca_jax.kernels import native as api
from orca_jax.kernels.native import library
from tests.kernels.native.machine import library_of, needs_library

SOURCE = Path(library.__file__).with_name("product.c")
EMULATED = Path(__file__).with_name("emulated_amx.h")
TARGET = "test_product_with_amx"


def compiled(path: Path, *options: str) -> Path:
    options = ("-march=native", *options, "-shared", f"-I{jax.ffi.include_dir()}")
    command = ["cc", *library.OPTIONS, *options, str(SOURCE), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return path


@cache
def register(path: Path) -> None:
    """Make the product with emulated instructions known to XLA."""
    made = ctypes.CDLL(str(compiled(path, "-include", str(EMULATED))))
    assert made.orca_jax_ask_for_amx() == 1
    jax.ffi.register_ffi_target(
        TARGET, jax.ffi.pycapsule(made.orca_jax_packed_products), platform="cpu"
    )


@pytest.fixture
def emulated(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """Products by emulated instructions; the width of a block."""
    width = library_of().width
    if "avx512_bf16" not in all_cpu_flags():
        pytest.skip("processors with AMX have AVX512-BF16 too")
    register(tmp_path_factory.getbasetemp() / "amx.so")
    monkeypatch.setattr("orca_jax.kernels.native.products.PACKED_PRODUCTS", TARGET)
    return width


def numbers(rows: int, columns: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, columns)), jnp.bfloat16)


@needs_library
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 49])
@pytest.mark.parametrize(
    "inputs", [32, 96, 38], ids=["one part", "three parts", "not whole parts, without AMX"]
)
def test_a_product(rows: int, inputs: int, emulated: int) -> None:
    x, matrix = numbers(rows, inputs, 1), numbers(inputs, 3 * emulated, 2)
    expected = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64)
    np.testing.assert_allclose(
        np.asarray(api.packed_product(x, api.pack(matrix, emulated))), expected, atol=1e-4
    )


@needs_library
def test_a_row_does_not_depend_on_the_others(emulated: int) -> None:
    x, packed = numbers(70, 96, 1), api.pack(numbers(96, 2 * emulated, 2), emulated)
    together = np.asarray(api.packed_product(x, packed))
    for rows in range(1, 70):
        np.testing.assert_array_equal(
            np.asarray(api.packed_product(x[:rows], packed)), together[:rows]
        )


@needs_library
def test_experts_multiply_their_own_rows(emulated: int) -> None:
    """Some have fewer rows than a register."""
    sizes, x = [3, 0, 40, 1], numbers(44, 96, 1)
    stack = api.pack(jnp.stack([numbers(96, 2 * emulated, seed) for seed in range(4)]), emulated)
    (found,) = api.packed_products(
        x, [api.Packed(stack, api.LayerRows(jnp.int32(0), jnp.array(sizes)))]
    )
    for expert, first in enumerate(np.cumsum([0, *sizes[:-1]])):
        rows = slice(first, first + sizes[expert])
        if sizes[expert]:
            np.testing.assert_array_equal(found[rows], api.packed_product(x[rows], stack[expert]))


@needs_library
def test_threads_share_a_large_product(emulated: int) -> None:
    x, packed = numbers(17, 512, 1), api.pack(numbers(512, 16 * emulated, 2), emulated)
    alone = np.asarray(api.packed_product(x, packed, devices=1000))
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(api.packed_product(x, packed)), alone)


@needs_library
def test_the_instructions_are_compiled_for_processors_that_have_them(tmp_path: Path) -> None:
    program = compiled(tmp_path / "amx.so", "-march=sapphirerapids").read_bytes()
    product_of_registers = bytes.fromhex("c4e24a5cc4")  # tdpbf16ps: tmm0 += tmm4 @ tmm6
    assert product_of_registers in program
    if not library_of().has_amx:
        assert product_of_registers not in compiled(tmp_path / "native.so").read_bytes()


@needs_library
def test_no_rows_configure_no_registers(tmp_path: Path) -> None:
    """The processor refuses registers of 0 rows, and so does the emulator: it ends the program."""
    program = tmp_path / "no_rows.c"
    program.write_text(
        f'#include "{SOURCE}"\n'
        "int main(void) {\n"
        "  const int32_t sizes[2] = {0, 0};\n"
        "  const Product product = {.words = 32, .outputs = WIDTH};\n"
        "  const List list = {.count = 1, .places = {{0, 2, 0, sizes}}, .products = {product}};\n"
        "  if (!orca_jax_ask_for_amx()) return 2;\n"
        "  multiply_blocks(&list, 0, 1);\n"
        "  return 0;\n"
        "}\n"
    )
    options = ("-march=native", "-include", str(EMULATED), f"-I{jax.ffi.include_dir()}")
    command = ["cc", *library.OPTIONS[:3], *options, str(program)]
    subprocess.run(
        [*command, "-o", str(tmp_path / "no_rows")], check=True, capture_output=True, text=True
    )
    assert subprocess.run([str(tmp_path / "no_rows")], check=False).returncode == 0
