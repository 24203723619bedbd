"""A small model in checkpoints of Orbax: written, loaded and refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from orca_jax.model.load import load_decoder
from orca_jax.model.parameters import flat_parameters
from orca_jax.values.errors import CheckpointError
from tests.model.reference import mesh_of

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 11,
    "max_position_embeddings": 32,
}
UP = "blocks.mlp.up.kernel"

Tree = dict[str, Any]


def nested(flat: Mapping[str, Any]) -> Tree:
    tree: Tree = {}
    for path, value in flat.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def save(folder: Path, tree: object) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


def assert_served(directory: Path, flat: Mapping[str, np.ndarray], devices: int = 1) -> None:
    decoder = load_decoder(directory, dtype="float32", mesh=mesh_of(devices))
    for path, value in flat_parameters(nnx.state(decoder)).items():
        rows = flat[path].shape[0]
        np.testing.assert_array_equal(np.asarray(value)[:rows], flat[path], err_msg=path)
        assert not np.asarray(value)[rows:].any(), "the padding of the vocabulary is zeros"


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    return caught.value
