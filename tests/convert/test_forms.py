"""Published forms that `orca-jax convert` writes equal those of the programs that define them."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from orca_jax.model.files.opened import LocalFile
from orca_jax.model.files.safetensors import read_header
from orca_jax.tools.convert.args import PublishedFormat
from orca_jax.tools.convert.forms import FORMS, fp8_blocks

RECORDS = Path(__file__).parents[1] / "fixtures" / "published"
GROUP = 32  # of the records


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file, with types that the reader of safetensors lacks."""
    with path.open("rb") as file:
        tensors, _ = read_header(LocalFile(file.fileno()), 2**20)
        return {name: each.all() for name, each in tensors.items()}


@pytest.mark.parametrize(
    ("form", "record", "weight"),
    [
        ("awq", "awq", "awq"),
        ("gptq", "gptq-4", "gptq-4"),
        ("w4a16", "packed-4", "compressed"),
        ("w8a16", "packed-8", "compressed"),
        ("w8a8", "int8", "compressed"),
        ("fp8", "fp8-channel", "compressed"),
        ("nvfp4", "nvfp4", "compressed"),
    ],
)
def test_parts_are_those_of_other_programs(form: PublishedFormat, record: str, weight: str) -> None:
    """Each tensor of the record is written, and equal byte by byte."""
    stored = tensors_of(RECORDS / f"{record}.safetensors")
    del stored["plain"]
    plain = load_file(RECORDS.with_name("published_weights.safetensors"))[weight]
    size = GROUP if FORMS[form].has_groups else plain.shape[1]
    ours = FORMS[form].parts(plain, size)
    assert {f"layer.{name}" for name in ours} == stored.keys()
    for name, values in ours.items():
        theirs = stored[f"layer.{name}"]
        assert (values.dtype, values.shape) == (theirs.dtype, theirs.shape), name
        assert values.tobytes() == theirs.tobytes(), name


def test_settings_are_those_of_other_programs() -> None:
    """What a record's configuration says of numbers is what ours says."""
    for form, record in (("w4a16", "packed-4"), ("fp8", "fp8-channel"), ("nvfp4", "nvfp4")):
        with safe_open(RECORDS / f"{record}.safetensors", framework="numpy") as file:
            theirs = json.loads(file.metadata()["quantization_config"])
        ours = FORMS[form].settings(GROUP, ["lm_head"])
        assert (ours["format"], ours["ignore"]) == (theirs["format"], theirs["ignore"])
        weights = ours["config_groups"]["group_0"]["weights"]
        of_theirs = theirs["config_groups"]["group_0"]["weights"]
        assert weights == {name: of_theirs[name] for name in weights}


def test_blocks_of_fp8() -> None:
    """Two by two blocks, of which the last ones are smaller; the largest number of each becomes 448."""
    weight = np.zeros((130, 200), np.float32)
    weight[0, 0], weight[3, 130] = 896, -44.8
    weight[129, 5] = 1
    parts = fp8_blocks(weight, 0)
    assert parts["weight_scale_inv"].shape == (2, 2)
    np.testing.assert_allclose(
        parts["weight_scale_inv"], [[2, 0.1], [1 / 448, np.finfo(np.float32).eps]], rtol=1e-6
    )
    numbers = parts["weight"].astype(np.float32)
    assert (numbers[0, 0], numbers[3, 130], numbers[129, 5]) == (448, -448, 448)
    assert np.count_nonzero(numbers) == 3


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros(form: PublishedFormat) -> None:
    """A matrix of zeros has scales that do not divide by zero."""
    parts = FORMS[form].parts(np.zeros((16, 128), np.float32), 128)
    for name, values in parts.items():
        assert np.isfinite(values.astype(np.float32)).all(), name


def test_each_form_has_a_writer() -> None:
    assert get_args(PublishedFormat) == tuple(FORMS)
