"""Matrices in published forms, beside the entries that the makers' own code gives (scripts/record_published.py)."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.native import PackedBits, unpack_columns
from orca_jax.model.files.opened import LocalFile
from orca_jax.model.files.safetensors import StoredTensor, read_header
from orca_jax.model.files.stripes import TensorRows
from orca_jax.model.published.config import read_stored_form
from orca_jax.model.published.integers import IntegerMatrix
from orca_jax.model.published.tensors import with_published

RECORDS = Path(__file__).parents[2] / "fixtures" / "published"
NAMES = sorted(path.stem for path in RECORDS.iterdir())
INTEGERS = [name for name in NAMES if not name.startswith(("fp8", "nvfp4"))]
WIDTH = 32


@contextmanager
def opened(name: str) -> Iterator[tuple[TensorRows, np.ndarray]]:
    """The matrix of a record in an open file, and its entries [O, I]."""
    path = RECORDS / f"{name}.safetensors"
    descriptor = os.open(path, os.O_RDONLY)
    try:
        tensors, _ = read_header(LocalFile(descriptor), 2**20)
        plain = values_of(descriptor, tensors.pop("plain"))
        form = read_stored_form(config_of(path))
        found = with_published(tensors, form)
        assert not found.problems
        assert set(found.tensors) == {"layer.weight"}
        yield found.rows["layer.weight"], plain
    finally:
        os.close(descriptor)


def config_of(path: Path) -> dict[str, object]:
    """The `quantization_config` of a record."""
    stored = path.read_bytes()
    header = json.loads(stored[8 : 8 + int.from_bytes(stored[:8], "little")])
    config: dict[str, object] = json.loads(header["__metadata__"]["quantization_config"])
    return config


def values_of(descriptor: int, tensor: StoredTensor) -> np.ndarray:
    """A tensor in float32."""
    count = int(np.prod(tensor.shape))
    return np.frombuffer(os.pread(descriptor, 4 * count, tensor.begin), np.float32).reshape(
        tensor.shape
    )


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_those_of_the_makers(name: str) -> None:
    with opened(name) as (matrix, plain):
        wanted = plain.T if matrix.is_turned else plain
        assert (matrix.num_rows, matrix.num_columns) == wanted.shape
        for start, stop in ((0, len(wanted)), (3, 50), (32, 33), (40, len(wanted))):
            rows = np.empty((stop - start, matrix.num_columns), np.float32)
            matrix.read_into(start, rows)
            np.testing.assert_array_equal(rows, wanted[start:stop])


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_packed_entries_are_those_of_the_makers(name: str, num_blocks: int) -> None:
    """The third block has no outputs in the file."""
    with opened(name) as (matrix, plain):
        assert isinstance(matrix, IntegerMatrix)
        assert matrix.form is not None
        packed = joined(matrix, num_blocks)
        entries = np.asarray(unpack_columns(packed, jnp.arange(num_blocks * WIDTH)))
        if matrix.input_order is not None:
            entries = entries[:, np.argsort(matrix.input_order)]
        np.testing.assert_array_equal(entries[: len(plain)], plain)
        np.testing.assert_array_equal(entries[len(plain) :], 0)


@pytest.mark.parametrize("name", ["awq", "packed-4-zeros"])
def test_some_outputs_in_another_order(name: str) -> None:
    """As for a parameter whose columns are some of those of a joined tensor."""
    outputs = np.concatenate([np.arange(40, 56), np.arange(8, 24)])
    with opened(name) as (matrix, plain):
        assert isinstance(matrix, IntegerMatrix)
        matrix = type(matrix)(**{**vars(matrix), "outputs": outputs})
        assert matrix.fills((128, 32), "kernel")
        assert not matrix.fills((128, 64), "kernel")
        entries = np.asarray(unpack_columns(joined(matrix, 1), jnp.arange(WIDTH)))
        np.testing.assert_array_equal(entries, plain[outputs])


def test_what_the_form_says() -> None:
    """Zero points in the middle need no minima, and groups in order no order, whatever config.json has."""
    forms = {}
    for name in INTEGERS:
        with opened(name) as (matrix, _):
            assert isinstance(matrix, IntegerMatrix)
            forms[name] = matrix.form
    kinds = {
        name: (form.bits, form.group, form.has_minima, form.has_order)
        for name, form in forms.items()
        if form is not None
    }
    assert kinds == {
        "awq": (4, 32, True, False),
        "gptq-4": (4, 32, False, False),
        "gptq-4-all-inputs": (4, 128, False, False),
        "gptq-4-order": (4, 32, True, True),
        "gptq-4-zeros": (4, 32, True, False),
        "gptq-8": (8, 32, True, False),
        "gptq-v2": (4, 32, True, False),
        "int8": (8, 128, False, False),
        "packed-4": (4, 32, False, False),
        "packed-4-zeros": (4, 32, True, False),
        "packed-8": (8, 128, False, False),
    }


def joined(matrix: IntegerMatrix, num_blocks: int) -> PackedBits:
    """All packed blocks of a matrix."""
    parts = [packed for _, packed in matrix.blocks(num_blocks, WIDTH)]

    def together(name: str) -> jnp.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else jnp.asarray(np.concatenate(arrays))

    assert matrix.form is not None
    return PackedBits(
        together("words"), together("scales"), matrix.form.bits, minima=together("minima")
    )
