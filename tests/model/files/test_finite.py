"""Weights that are NaN or infinite: counted in every type, and one warning names their tensors."""

import logging
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from orca_jax.helpers.hub import SINGLE
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.files.finite import NotFinite, num_not_finite
from orca_jax.model.load import load_decoder
from tests.model.reference import copy_of, mesh_of

TYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_kind_of_number(dtype: type) -> None:
    finfo = ml_dtypes.finfo(dtype)
    good = np.array(
        [0.0, -0.0, 1.5, -2.0, float(finfo.max), float(finfo.min), float(finfo.tiny)]
    ).astype(dtype)
    assert num_not_finite(good) == 0 and num_not_finite(good[:0]) == 0
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        for place in (0, len(good)):
            assert num_not_finite(np.insert(good, place, np.array(bad, dtype))) == 1
    bits = np.frombuffer(np.full(3, -1, np.int64).tobytes(), dtype)
    assert num_not_finite(np.concatenate([good, bits])) == len(bits), "all bits set are NaN"


def test_integers_have_none() -> None:
    assert num_not_finite(np.full(3, -1, np.int8)) == 0


def test_a_tensor_read_twice_is_counted_once(caplog: pytest.LogCaptureFixture) -> None:
    counts = NotFinite()
    for number in range(12):
        counts.add_tensor(f"t{number}", number)
    counts.add_tensor("t3", 2)
    counts.warn("model")
    (record,) = caplog.records
    assert "NaN or infinity in t1 (1 values), t2 (2 values), t3 (3 values)" in record.getMessage()
    assert "t10 (10 values), 1 more" in record.getMessage() and "t0" not in record.getMessage()


@pytest.mark.parametrize(("devices", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_loading_warns_and_names_the_tensors(
    tmp_path: Path, devices: int, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of("llama-12-heads-3-groups", tmp_path)
    load_decoder(directory, dtype=dtype, mesh=mesh_of(devices))  # type: ignore[arg-type]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    tensors = load_file(directory / SINGLE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = math.nan
    tensors["model.norm.weight"][:2] = -math.inf, math.inf
    tensors["lm_head.weight"][-1, -1] = math.inf
    save_file(tensors, directory / SINGLE)
    load_decoder(directory, dtype=dtype, mesh=mesh_of(devices))  # type: ignore[arg-type]
    (message,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert str(directory) in message
    for name, count in (
        ("layers.1.mlp.up_proj.weight", 1),
        ("model.norm.weight", 2),
        ("lm_head.weight", 1),
    ):
        assert f"{name} ({count} values)" in message


def test_checkpoints_of_orbax_are_counted_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of("llama-12-heads-3-groups", tmp_path)
    decoder = load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    kernel = decoder.blocks.mlp.up.kernel
    kernel.set_value(kernel.get_value().at[0, 1, 2].set(math.nan))
    save_decoder(decoder, directory, "float32")
    load_decoder(directory, dtype="bfloat16", mesh=mesh_of(2))
    (message,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert f"{directory}/params: NaN or infinity in blocks.mlp.up.kernel (1 values): " in message
