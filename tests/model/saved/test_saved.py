"""What `save_pretrained` of transformers writes is read: default configurations, and the tensors of small models."""

import json
import struct
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path

import pytest

from orca_jax.model.describe import read_model_config
from orca_jax.model.families import FAMILIES
from orca_jax.model.load import load_decoder
from orca_jax.values.errors import ConfigError
from tests.model.reference import mesh_of
from tests.model.saved.record import load

records = cache(load)

NO_MODELS = {
    "arcee": "eos_token_id .* is outside the vocabulary",
    "starcoder2": "eos_token_id .* is outside the vocabulary",
    "glm4_moe": "num_attention_heads 96 does not divide hidden_size 4096",
    "glm4v_moe": "num_attention_heads 96 does not divide hidden_size 4096",
    "lfm2_moe": "layer_types must have 32 of",
}
"""Default configurations that no published model has, and the refusals that say what does not fit together."""
NOT_THERE = {"kimi_k2"}
"""Served types that transformers 5.24 does not have."""


class Enough(Exception):
    """The first parameter was read: all tensors fit."""


def stop(done: int, total: int) -> None:
    raise Enough


def write_zeros(folder: Path, shapes: Mapping[str, list[int]]) -> None:
    """A file of safetensors whose tensors are zeros, without writing them."""
    header = {}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end += 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def test_every_served_type_is_recorded() -> None:
    assert {kind.partition(" ")[0] for kind in records()} == FAMILIES.keys() - NOT_THERE


@pytest.mark.parametrize("kind", records())
def test_default_configurations_are_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(records()[kind].default), encoding="utf-8")
    if kind not in NO_MODELS:
        assert read_model_config(tmp_path).family == kind.partition(" ")[0]
        return
    with pytest.raises(ConfigError, match=NO_MODELS[kind]):
        read_model_config(tmp_path)


@pytest.mark.parametrize("kind", records())
def test_tensors_have_the_names_and_shapes_of_the_table(kind: str, tmp_path: Path) -> None:
    record = records()[kind]
    (tmp_path / "config.json").write_text(json.dumps(record.config), encoding="utf-8")
    write_zeros(tmp_path, record.shapes)
    with pytest.raises(Enough):
        load_decoder(tmp_path, dtype="float32", mesh=mesh_of(1), progress=stop)
