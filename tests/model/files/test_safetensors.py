"""Headers of safetensors: what the library writes is read, and damaged or cut files are refused with the reason."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from orca_jax.helpers.hub import SINGLE
from orca_jax.model.files.opened import LocalFile
from orca_jax.model.files.safetensors import read_header
from orca_jax.model.load import load_decoder
from orca_jax.values.errors import CheckpointError
from tests.model.reference import copy_of, mesh_of

LIMIT = 2**20


def header_of(path: Path, limit: int = LIMIT) -> Any:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(LocalFile(descriptor), limit)
    finally:
        os.close(descriptor)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode(
        "utf-8", "surrogatepass"
    )
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(*shape: int, begin: int = 0, dtype: str = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": shape,
        "data_offsets": [begin, begin + 4 * int(np.prod(shape))],
    }


def test_the_header_is_that_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays = {
        "m": np.zeros((2, 3), np.float32),
        "v": np.zeros(5, np.int8),
        "s": np.zeros((), np.float64),
    }
    save_file({**arrays, "none": np.zeros((0, 4), np.float32)}, path, metadata={"format": "pt"})
    found, _ = header_of(path)
    with safe_open(path, "numpy") as opened:
        slices = {key: opened.get_slice(key) for key in found}
        theirs = {key: (part.get_dtype(), part.get_shape()) for key, part in slices.items()}
    assert {key: (tensor.dtype, list(tensor.shape)) for key, tensor in found.items()} == theirs
    assert found.keys() == {*arrays, "none"}


@pytest.mark.parametrize(
    ("header", "size", "reason"),
    [
        ({"a": entry(2)}, 7, "it has .* bytes, and by its header .*: it was cut or changed"),
        ({"a": entry(2)}, 9, "it was cut or changed"),
        (
            {"a": entry(2), "b": entry(1, begin=12)},
            16,
            "'b' begins at 12, behind data that end at 8",
        ),
        ({"a": entry(2), "b": entry(1, begin=4)}, 8, "'b' begins at 4, behind data that end at 8"),
        ({"a": {**entry(2), "shape": [3]}}, 8, "'a' has 8 bytes, which are not its shape"),
        ({"a": {**entry(2), "shape": [2**62, 2]}}, 8, "which are not its shape"),
        ({"a": {**entry(2), "shape": [2**63]}}, 8, "'a' has a wrong dtype, shape or data_offsets"),
        ({"a": {**entry(2), "shape": [2.0]}}, 8, "'a' has a wrong dtype"),
        ({"a": {**entry(2), "data_offsets": [8, 0]}}, 8, "'a' has -8 bytes"),
        ({"a": {"dtype": "F32"}}, 8, "'a' has no dtype, shape and data_offsets"),
        ({"a": 3}, 0, "'a' has no dtype"),
        ('{"a": 1, "a": 2}', 0, "'a' is listed twice"),
        ({"\udc00": entry(2)}, 8, "surrogates not allowed"),
        ({"a": {**entry(2), "dtype": "\ud800x"}}, 8, "surrogates not allowed"),
        ("[" * 10_000, 0, "its header is damaged"),
        ([], 0, "its header is damaged"),
        ("{", 0, "its header is damaged"),
        (" " * LIMIT + "{}", 0, "and at most 1048576 are read"),
    ],
    ids=str,
)
def test_damages_are_named(tmp_path: Path, header: object, size: int, reason: str) -> None:
    with pytest.raises(OSError, match=reason):
        header_of(write(tmp_path / "a.safetensors", header, bytes(size)))


@pytest.mark.parametrize("length", [2**31, 2**63, 2**64 - 1])
def test_lengths_are_compared_with_the_file(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(OSError, match=f"its header needs {8 + length}: it was cut"):
        header_of(path)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """With a mapped file, this test would end the process."""
    directory = copy_of("llama-12-heads-3-groups", tmp_path)

    def cut(done: int, total: int) -> None:
        os.truncate(directory / SINGLE, 4096)

    with pytest.raises(CheckpointError, match=r"cannot be read: the file ends within the tensor"):
        load_decoder(directory, dtype="float32", mesh=mesh_of(1), progress=cut)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "device"]
)
def test_a_pipe_or_a_device_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    directory = copy_of("llama-biases-sharded", tmp_path)
    part = min(directory.glob("model-*.safetensors"))
    part.unlink()
    make(part)
    with pytest.raises(CheckpointError, match=f"{part.name}: cannot be read: not a regular file"):
        load_decoder(directory, dtype="float32", mesh=mesh_of(1))
