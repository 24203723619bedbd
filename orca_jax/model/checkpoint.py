"""Orbax checkpoints of a decoder: its parameter tree, with the vocabulary unpadded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array

from orca_jax.config import DType, ModelConfig
from orca_jax.errors import CheckpointError
from orca_jax.model.parameters import first_line, flat_parameters, stored_shape, with_parameters
from orca_jax.model.transformer import Block, Decoder
from orca_jax.progress import Progress

PARAMS = "params"
"""The folder of a model directory that holds the Orbax checkpoint."""


def save_decoder(decoder: Decoder, directory: Path, dtype: DType) -> None:
    """Write the parameters as `dtype` to the new folder `directory`/params."""
    assert isinstance(decoder.blocks, Block), "checkpoints hold stacked layers: save before `unstack`"
    tree: dict[str, Any] = {}
    for path, value in flat_parameters(nnx.state(decoder)).items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        rows = stored_shape(path, value.shape, decoder.config)[0]
        node[name] = np.asarray(value[:rows].astype(jnp.dtype(dtype)))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory.absolute() / PARAMS, args=ocp.args.PyTreeSave(tree))


def load_orbax(directory: Path, config: ModelConfig, shapes: nnx.State, progress: Progress) -> nnx.State:
    """Read `directory`/params, each device its own shards.

    Args:
        directory: the model directory.
        config: the model; gives the size of the vocabulary without padding.
        shapes: tree of `ShapeDtypeStruct` with shardings, padded; values are cast to its types.
        progress: called after each parameter.

    Raises:
        CheckpointError: lists every missing, unexpected, misshapen and unreadable parameter.
    """
    folder = directory.absolute() / PARAMS
    wanted = flat_parameters(shapes)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        problems = _compare(_stored_shapes(checkpointer, folder), wanted, config)
        if problems:
            raise CheckpointError(str(folder), problems)
        values: dict[str, Array] = {}
        for path, leaf in wanted.items():
            try:
                values[path] = _restore(checkpointer, folder, path, leaf)
            except Exception as error:  # Orbax raises bare `Exception` for some broken files
                problems.append(f"{path}: cannot be read: {first_line(error)}")
            progress(len(values), len(wanted))
    if problems:
        raise CheckpointError(str(folder), problems)
    return with_parameters(shapes, values)


def _stored_shapes(checkpointer: ocp.Checkpointer, folder: Path) -> dict[str, tuple[int, ...]]:
    if not (folder / "_METADATA").is_file():
        raise CheckpointError(str(folder), ["not a complete Orbax checkpoint: _METADATA is missing"])
    try:
        tree = checkpointer.metadata(folder).item_metadata.tree
    except Exception as error:  # Orbax raises bare `Exception` here too
        raise CheckpointError(str(folder), [f"the metadata cannot be read: {first_line(error)}"]) from error
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "shape"))
    return {".".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves}


def _compare(stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Any], config: ModelConfig) -> list[str]:
    problems = [f"{path}: missing" for path in wanted if path not in stored]
    problems += [f"{path}: unexpected" for path in stored if path not in wanted]
    for path, leaf in wanted.items():
        shape = stored_shape(path, leaf.shape, config)
        if path in stored and stored[path] != shape:
            problems.append(f"{path}: shape {list(stored[path])}, the model needs {list(shape)}")
    return problems


def _restore(checkpointer: ocp.Checkpointer, folder: Path, path: str, leaf: jax.ShapeDtypeStruct) -> Array:
    """Read one parameter. `strict=False` lets Orbax pad the vocabulary with zeros while it reads each shard."""
    item: Any = leaf
    args: Any = ocp.ArrayRestoreArgs(
        restore_type=jax.Array, sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False
    )
    for key in reversed(path.split(".")):
        item, args = {key: item}, {key: args}
    restored = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(item, restore_args=args, partial_restore=True))
    (value,) = jax.tree.leaves(restored)
    assert isinstance(value, jax.Array), path
    return value
