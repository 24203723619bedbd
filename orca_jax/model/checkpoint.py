"""Orbax checkpoints of a decoder: its parameter tree, with the vocabulary unpadded.

Orbax writes them. They are read with TensorStore, the library below Orbax: only the arrays of the parameters are
opened, so optimiser state beside them costs nothing.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from flax import nnx
from jaxtyping import Array

from orca_jax.config import DType, ModelConfig
from orca_jax.errors import CheckpointError
from orca_jax.model.orbax_files import CONVERT_AGAIN, PARAMS, SAVE_AGAIN, Keys, StoredTree, orbax_root, read_tree
from orca_jax.model.parameters import (
    Wanted,
    copied_columns,
    first_copies,
    first_line,
    flat_parameters,
    is_stacked,
    num_copies,
    stored_shape,
)
from orca_jax.model.quantise import is_quantised_part
from orca_jax.model.transformer import Block, Decoder
from orca_jax.progress import Progress

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ARRAYS = ("jax.Array", "np.ndarray")

logger = logging.getLogger(__name__)


def save_decoder(decoder: Decoder, directory: Path, dtype: DType) -> None:
    """Write the parameters as `dtype`, and quantised ones as they are, to the new folder `directory`/params."""
    assert isinstance(decoder.blocks, Block), "checkpoints hold stacked layers: save before `unstack`"
    tree: dict[str, Any] = {}
    for path, value in flat_parameters(nnx.state(decoder)).items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        rows, copies = stored_shape(path, value.shape, decoder.config)[0], num_copies(path, decoder.config)
        stored = np.asarray(value[:rows] if is_quantised_part(path) else value[:rows].astype(jnp.dtype(dtype)))
        node[name] = first_copies(stored, copies, decoder.config.head_dim) if copies > 1 else stored
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory.absolute() / PARAMS, args=ocp.args.PyTreeSave(tree))


def load_orbax(directory: Path, config: ModelConfig, wanted: Wanted, progress: Progress) -> nnx.State:
    """Read the Orbax checkpoint of `directory`, each device its own shards.

    In a training state such as {params, opt_state, step}, only the parameters are read.

    Args:
        directory: the model directory; see `orbax_root` for the folder of the checkpoint.
        config: the model; gives the size of the vocabulary without padding.
        wanted: the parameters.
        progress: called after each parameter.

    Raises:
        CheckpointError: lists every missing, unexpected, misshapen and unreadable parameter, and those of other types.
    """
    tree = read_tree(orbax_root(directory.absolute()) or directory.absolute() / PARAMS)
    if any(keys[-2:] == ("kernel", "values") for keys in tree.leaves):
        if wanted.kind is None:
            problem = "the parameters are quantised, and config.json has no quantization_config for them"
            raise CheckpointError(str(tree.folder), [problem], remedy=CONVERT_AGAIN)
        wanted = wanted.as_held()
    leaves, of_model = flat_parameters(wanted.shapes), flat_parameters(wanted.of_model)
    sources, problems = _find(tree, list(of_model))
    stores = {}
    for path, keys in sources.items():
        try:
            stores[path] = _open(tree, keys)
        except Exception as error:  # TensorStore raises several kinds for broken files
            problems.append(f"{path}: cannot be read: {first_line(error)}")
    problems += _compare(stores, of_model, config)
    values: dict[str, Array] = {}
    for number, (path, leaf) in enumerate(leaves.items() if not problems else (), start=1):
        try:
            first = wanted.first_layer if is_stacked(path) else 0
            array = _read(stores[path][first:], leaf, num_copies(path, config), config.head_dim)
            values |= wanted.parts(path, array)
        except Exception as error:
            problems.append(f"{path}: cannot be read: {first_line(error)}")
        progress(number, len(leaves))
    if problems:
        raise CheckpointError(str(tree.folder), problems, remedy=SAVE_AGAIN)
    return wanted.filled(values)


def _find(tree: StoredTree, wanted: Sequence[str]) -> tuple[dict[str, Keys], list[str]]:
    """The stored keys of each parameter, and the problems with them."""
    prefix = tree.prefix([tuple(path.split(".")) for path in wanted])
    if prefix is None:
        return {}, _unknown_place(tree, wanted)
    found = {path: tree.find(prefix, tuple(path.split("."))) for path in wanted}
    sources = {path: keys for path, keys in found.items() if keys is not None}
    problems = [f"{path}: missing" for path in wanted if path not in sources]
    for path in [path for path, keys in sources.items() if tree.leaves[keys] not in _ARRAYS]:
        problems.append(f"{path}: type {tree.leaves[sources.pop(path)]} is not supported, only {', '.join(_FLOATS)}")
    known = set(found.values())
    inside = [keys for keys in tree.leaves if keys[: len(prefix)] == prefix]
    problems += [f"{'.'.join(keys[len(prefix) :])}: unexpected" for keys in inside if keys not in known]
    skipped = {".".join(keys[: len(prefix)]) for keys in tree.leaves if keys[: len(prefix)] != prefix}
    if skipped:
        beside = ", ".join(sorted(skipped)[:5])
        logger.info("%s of %s is served; not read: %s", ".".join(prefix), tree.folder, beside)
    return sources, problems


def _unknown_place(tree: StoredTree, wanted: Sequence[str]) -> list[str]:
    """The problem of a tree without parameters at one of the usual places. Another place is named, if there is one."""
    first = tuple(wanted[0].split("."))
    for keys in tree.leaves:
        plain = keys[:-1] if keys[-1:] == ("value",) else keys
        if plain[-len(first) :] == first:
            place = ".".join(plain[: -len(first)])
            return [f"the parameters are under {place}, not under params: save that part of the tree alone"]
    tops = ", ".join(sorted({keys[0] for keys in tree.leaves if keys})[:10]) or "nothing"
    return [f"{wanted[0]}: missing, as all {len(wanted)} parameters of the model; the tree has {tops}"]


def _open(tree: StoredTree, keys: Keys) -> Any:
    """Open an array without reading its values. Orbax names it by its keys, joined with dots."""
    name = ".".join(keys)
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{tree.folder / name}/"}
    if tree.is_ocdbt:
        base = {"driver": "file", "path": f"{tree.folder}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {
        "driver": "zarr3" if tree.is_zarr3 else "zarr",
        "kvstore": kvstore,
        # Otherwise the values of a lost file are zeros. Old versions of Orbax leave out chunks of zeros on purpose.
        "fill_missing_data_reads": not tree.has_all_chunks,
    }
    return tensorstore.open(spec, open=True, read=True).result()


def _compare(stores: Mapping[str, Any], wanted: Mapping[str, Any], config: ModelConfig) -> list[str]:
    """List problems with shapes and types."""
    problems = []
    for path, store in stores.items():
        shape, stored = stored_shape(path, wanted[path].shape, config), tuple(store.shape)
        if stored != shape:
            problems.append(f"{path}: shape {list(stored)}, the model needs {list(shape)}")
        types = (wanted[path].dtype.name,) if is_quantised_part(path) else _FLOATS
        if store.dtype.name not in types:
            problems.append(f"{path}: type {store.dtype.name} is not supported, only {', '.join(types)}")
        chunk = store.chunk_layout.read_chunk.shape or ()
        if stored == shape and any(part > max(size, 1) for part, size in zip(chunk, shape, strict=True)):
            problems.append(f"{path}: chunks of {list(chunk)} values are larger than the array")  # and than the memory
    return problems


def _read(store: Any, leaf: jax.ShapeDtypeStruct, copies: int, head_dim: int) -> Array:
    """Read one parameter. All shards are read at once; rows of the vocabulary beyond the stored ones are zeros.

    `copies` and `head_dim` are those of `copied_columns`.
    """
    store = store.translate_to[0]
    reads = {}
    for index in set(leaf.sharding.addressable_devices_indices_map(leaf.shape).values()):
        bounds = [range(*part.indices(size)) for part, size in zip(index, leaf.shape, strict=True)]
        columns = copied_columns(bounds[-1], copies, head_dim)
        if copies > 1:
            bounds[-1] = range(columns[0], columns[-1] + 1)
        cut = tuple(
            slice(min(bound.start, size), min(bound.stop, size))
            for bound, size in zip(bounds, store.shape, strict=True)
        )
        reads[index] = ([len(bound) for bound in bounds], columns - bounds[-1].start, store[cut].read())

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "every parameter has at least one axis"
        shape, columns, read = reads[index]
        values = np.asarray(read.result()).astype(leaf.dtype)
        padding = [(0, size - found) for size, found in zip(shape, values.shape, strict=True)]
        values = np.pad(values, padding) if any(after for _, after in padding) else values
        return values[..., columns] if copies > 1 else values

    array: Array = jax.make_array_from_callback(leaf.shape, leaf.sharding, shard, dtype=leaf.dtype)
    return array
