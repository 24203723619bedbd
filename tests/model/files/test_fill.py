"""Weights from files: each matrix is read once, into the memory of the result, in every form of the layers."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from orca_jax.model.families.base import JoinedPart
from orca_jax.model.files import stripes
from orca_jax.model.files.opened import LocalFile
from orca_jax.model.files.stripes import CopyTarget, FileMatrix, aligned_empty, as_range, copy
from orca_jax.model.leaves import fill
from orca_jax.model.leaves.bits import BitsLeaf, BitsPlace
from orca_jax.model.load import prepare_load
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.transformer import Decoder
from tests.model.published import directories
from tests.model.reference import REFERENCE, mesh_of

MODELS = {  # with joined tensors, joined tensors in groups, copies of heads, rows before the first
    "gpt2-12-heads": 4,
    "gpt_neox-parallel": 2,
    "olmo2": 4,
    "opt": 2,
}
SLOW = ("gpt2-12-heads", "opt")


def a_file(folder: Path, values: np.ndarray, begin: int = 24) -> FileMatrix:
    path = folder / "values"
    path.write_bytes(b"\xff" * begin + values.tobytes())
    rows, columns = values.shape
    return FileMatrix(
        "a", rows, columns, values.dtype, LocalFile(os.open(path, os.O_RDONLY)), begin
    )


def test_pairs_that_lie_side_by_side() -> None:
    """Two groups of three and six columns: of the six, pairs of the columns 4 to 7 of a group become halves."""
    part = JoinedPart(1, (3, 6), groups=2, pairs=(1, 5))
    columns = [3, 4, 6, 5, 7, 8, 12, 13, 15, 14, 16, 17]
    assert part.column(np.arange(12)).tolist() == columns
    assert [part.column(number) for number in range(12)] == columns


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("kept", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("stripe", [1, 100_000], ids=["narrow", "wide"])
def test_parts_of_a_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: type, kept: type, stripe: int
) -> None:
    monkeypatch.setattr(stripes, "STRIPE_BYTES", stripe)
    values = np.random.default_rng(0).standard_normal((150, 70)).astype(stored)
    source = a_file(tmp_path, values)
    chosen = np.array([3, 4, 90, 1, 149])
    places = [
        CopyTarget(aligned_empty((150, 70), np.dtype(kept)), range(150), range(70), False),
        CopyTarget(aligned_empty((70, 150), np.dtype(kept)), range(70), range(150), True),
        CopyTarget(aligned_empty((20, 30), np.dtype(kept)), range(40, 60), range(7, 37), False),
        CopyTarget(aligned_empty((20, 99), np.dtype(kept)), range(40, 60), range(50, 149), True),
        CopyTarget(aligned_empty((20, 5), np.dtype(kept)), range(40, 60), chosen, True),
        CopyTarget(aligned_empty((150, 3), np.dtype(kept)), range(150), np.array([5, 5, 2]), False),
        CopyTarget(aligned_empty((0, 70), np.dtype(kept)), range(9, 9), range(70), False),
    ]
    copy(source, places)
    expected = values.astype(kept)
    for place in places:
        rows = expected[place.rows.start : place.rows.stop] if not place.is_transposed else expected
        wanted = (
            rows[:, np.array(place.columns)]
            if not place.is_transposed
            else rows[np.array(place.columns)].T
        )
        if place.is_transposed:
            wanted = wanted[place.rows.start : place.rows.stop]
        np.testing.assert_array_equal(place.values, wanted)
    os.close(source.file.number)


def test_a_file_that_ends_within_a_matrix(tmp_path: Path) -> None:
    source = a_file(tmp_path, np.zeros((4, 8), np.float32))
    os.truncate(tmp_path / "values", 60)
    with pytest.raises(OSError, match="ends within"):
        copy(source, [CopyTarget(np.empty((4, 8), np.float32), range(4), range(8), False)])
    os.close(source.file.number)


def test_ranges_are_recognised() -> None:
    assert as_range(np.array([4, 5, 6])) == range(4, 7)
    for numbers in ([4, 6, 5], [4, 4, 6], [6, 5, 4], []):
        assert isinstance(as_range(np.array(numbers, int)), np.ndarray)


def unstacked(name: str, devices: int) -> Decoder:
    loading = prepare_load(REFERENCE / name, dtype="float32", load_format="safetensors")
    return loading.load(mesh_of(devices), arrange=Decoder.unstack)


def values_of(decoder: Decoder) -> dict[str, jax.Array]:
    return flat_parameters(nnx.state(decoder))


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] if each[0] in SLOW else [])
        for each in MODELS.items()
    ],
)
def test_layers_are_read_as_they_are_unstacked(
    monkeypatch: pytest.MonkeyPatch, name: str, devices: int
) -> None:
    """The values and shardings are those of a stack that was taken apart, and no row of a file is read twice."""
    read = Counter[tuple[str, int]]()
    plain = FileMatrix.read_into

    def counted(self: FileMatrix, start: int, values: np.ndarray) -> None:
        read.update((self.key, row) for row in range(start, start + len(values)))
        plain(self, start, values)

    stack = prepare_load(REFERENCE / name, dtype="float32", load_format="safetensors").load(
        mesh_of(devices)
    )
    stack.unstack()
    monkeypatch.setattr(FileMatrix, "read_into", counted)
    ours, expected = values_of(unstacked(name, devices)), values_of(stack)
    assert ours.keys() == expected.keys() and max(read.values()) == 1
    for path, array in ours.items():
        assert array.sharding.is_equivalent_to(expected[path].sharding, array.ndim), path
        assert array.dtype == expected[path].dtype and np.array_equal(array, expected[path]), path


def test_weights_on_a_cpu_are_in_the_memory_that_was_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the host never holds more than the weights and a few stripes."""
    places = []

    def kept(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        values = aligned_empty(shape, dtype)
        places.append((values.ctypes.data, values.nbytes))
        return values

    monkeypatch.setattr(fill, "aligned_empty", kept)
    arrays = values_of(unstacked("llama-12-heads-3-groups", 1)).values()
    assert sorted(places) == sorted(
        (array.unsafe_buffer_pointer(), array.nbytes) for array in arrays
    )


@pytest.mark.parametrize(
    ("name", "devices"), [("olmo2", 4), ("gpt_neox-parallel", 2), ("mixtral", 1)]
)
def test_stacks_on_an_accelerator_are_put_together_there(
    monkeypatch: pytest.MonkeyPatch, name: str, devices: int
) -> None:
    """The host holds the matrix that moves, and at most the next two; no stack is there as a whole."""
    expected = values_of(prepare_load(REFERENCE / name, dtype="float32").load(mesh_of(devices)))
    monkeypatch.setattr(fill, "_has_own_memory", lambda device: True)
    monkeypatch.setattr(fill, "_num_threads", lambda: 1)
    held: list[int] = []
    plain = fill._Stack.memory

    def watched(self: fill._Stack, number: int) -> list[np.ndarray]:
        begin = self.source.num_stacked
        made = plain(self, number)
        assert all(len(part.shape) == len(self.shape.shape) - begin for part in made)
        held.append(len(self.pieces))
        return made

    monkeypatch.setattr(fill._Stack, "memory", watched)
    ours = values_of(prepare_load(REFERENCE / name, dtype="float32").load(mesh_of(devices)))
    assert all(np.array_equal(array, expected[path]) for path, array in ours.items())
    assert all(array.sharding == expected[path].sharding for path, array in ours.items())
    assert held and max(held) <= 3


def test_kept_bits_of_stacks_are_put_together_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, scales and zero points of a matrix come from one read of it."""
    loading = prepare_load(directories.write(tmp_path, "llama", "awq")[0], dtype="float32")
    keep = loading.keep_bits
    assert keep is not None
    kept = values_of(loading.load(mesh_of(2), arrange=lambda decoder: keep(decoder, None, 2)))
    monkeypatch.setattr(fill, "_has_own_memory", lambda device: True)
    read = Counter[str]()
    plain = BitsLeaf.read_into

    def counted(self: BitsLeaf, places: Sequence[BitsPlace]) -> int:
        read[self.key] += 1
        return plain(self, places)

    monkeypatch.setattr(BitsLeaf, "read_into", counted)
    ours = values_of(loading.load(mesh_of(2), arrange=lambda decoder: keep(decoder, None, 2)))
    assert ours.keys() == kept.keys() and len(read) == 14 and max(read.values()) == 1
    for path, array in ours.items():
        assert array.sharding == kept[path].sharding and np.array_equal(array, kept[path]), path


def test_vocabulary_without_padding_in_the_file() -> None:
    table = values_of(unstacked("gpt2-12-heads", 1))["embedding.table"]
    stored = load_file(REFERENCE / "gpt2-12-heads" / "model.safetensors")
    (rows,) = [values for key, values in stored.items() if key.endswith("wte.weight")]
    assert np.array_equal(table[: len(rows)], rows) and not np.asarray(table[len(rows) :]).any()
