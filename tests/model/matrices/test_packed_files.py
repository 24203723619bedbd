"""Files that are read into packed matrices."""

from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from orca_jax.assembly.executor import arrange_and_pack, arrange_for
from orca_jax.kernels.native import pack
from orca_jax.model.files.opened import LocalFile
from orca_jax.model.files.stripes import FileMatrix, PackedTarget, copy
from orca_jax.model.leaves.rows import RowSource
from orca_jax.model.load import prepare_load
from orca_jax.values.config import DType
from tests.kernels.native.machine import library_of, needs_library
from tests.model.reference import REFERENCE, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")  # values are moved alone


@needs_library
@pytest.mark.parametrize(
    ("name", "dtype", "devices"), [("mixtral", "bfloat16", 1), ("qwen3", "float32", 2)]
)
def test_packed_matrices_are_those_of_a_loaded_decoder(
    name: str, dtype: DType, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, library, loading = (
        jax.devices()[:devices],
        library_of(),
        prepare_load(REFERENCE / name, dtype=dtype),
    )
    plain = loading.load(mesh_of(devices), arrange=partial(arrange_for, None, own, library))
    plain.pack(library, devices)
    places, place = [], RowSource.place
    monkeypatch.setattr(
        RowSource,
        "place",
        lambda *args: places.append(place(*args)) or places[-1],  # type: ignore[func-returns-value]
    )
    direct = loading.load(mesh_of(devices), arrange=partial(arrange_and_pack, None, own, library))
    assert any(isinstance(each, PackedTarget) for each in places)
    for one, other in zip(
        nnx.to_flat_state(nnx.state(plain)), nnx.to_flat_state(nnx.state(direct)), strict=True
    ):
        assert one[0] == other[0] and type(one[1]) is type(other[1])
        assert one[1].get_value().sharding == other[1].get_value().sharding
        np.testing.assert_array_equal(
            *(np.asarray(each[1].get_value(), np.float32) for each in (one, other))
        )


@pytest.mark.parametrize(("dtype", "lines"), [("float32", range(4, 12)), ("bfloat16", range(2, 6))])
def test_a_part_of_a_packed_matrix_by_hand(dtype: DType, lines: range, tmp_path: Path) -> None:
    """The blocks 1 and 2 of four columns each, and the inputs from 4 to 11."""
    rows = np.asarray(jax.random.normal(jax.random.key(0), (16, 12), dtype))
    (tmp_path / "rows").write_bytes(rows.tobytes())
    packed = np.asarray(pack(jax.numpy.asarray(rows.T), 4))[1:3, lines.start : lines.stop]
    values = np.zeros_like(packed)
    with open(tmp_path / "rows", "rb") as file:
        source = FileMatrix("key", 16, 12, rows.dtype, LocalFile(file.fileno()), 0)
        assert copy(source, [PackedTarget(values, range(4, 12), range(4, 12), 4)]) == 0
    np.testing.assert_array_equal(values.astype(np.float32), packed.astype(np.float32))
