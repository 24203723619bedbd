"""Orbax checkpoints of a decoder: its parameter tree, with the vocabulary unpadded.

Orbax writes them. They are read with TensorStore, the library below Orbax: only the arrays of the parameters are
opened, so optimiser state beside them costs nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import tensorstore
from flax import nnx

from orca_jax.helpers.buckets.problems import problem_of_array
from orca_jax.helpers.buckets.views import shown
from orca_jax.helpers.console import Progress
from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.block import Block
from orca_jax.model.files.digests import check_digests
from orca_jax.model.files.opened import check_unchanged, kvstore_of
from orca_jax.model.leaves.fill import filled
from orca_jax.model.matrices.quantise import is_quantised_part
from orca_jax.model.orbax_files import (
    CONVERT_AGAIN,
    SAVE_AGAIN,
    Keys,
    StoredTree,
    orbax_root,
    read_tree,
)
from orca_jax.model.own import own_class
from orca_jax.model.parameters import (
    Wanted,
    first_copies,
    flat_parameters,
    head_dim_of,
    num_copies,
    stored_shape,
    stored_shapes,
    with_layers,
)
from orca_jax.model.transformer import Decoder
from orca_jax.model.trees.choose import ParameterArrays, choose_table, find_arrays
from orca_jax.model.trees.leaves import view_sources
from orca_jax.model.trees.mapping import TreeMapping, read_mapping
from orca_jax.model.trees.memory import nested
from orca_jax.model.trees.rows import LAYER, TreeTable
from orca_jax.model.trees.views import Entry, Stacked, Stored, Transposed, View
from orca_jax.values.config import DType, ModelConfig
from orca_jax.values.errors import CheckpointError

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ARRAYS = ("jax.Array", "np.ndarray")

logger = logging.getLogger(__name__)


class ArrayOfTree(NamedTuple):
    """An array of a tree, open and not read: its values, its type, and the shape of its parts on disk."""

    view: View
    dtype: str
    chunk: tuple[int, ...] = ()  # empty in memory


def save_decoder(decoder: Decoder, directory: Path, dtype: DType) -> None:
    """Write the parameters as `dtype`, and quantised ones as they are, to the new folder `directory`/params."""
    assert isinstance(decoder.blocks, Block), (
        "checkpoints hold stacked layers: save before `unstack`"
    )
    leaves: dict[Keys, np.ndarray] = {}
    for path, value in flat_parameters(nnx.state(decoder)).items():
        rows = stored_shape(path, value.shape, decoder.config)[0]
        copies = num_copies(path, decoder.config)
        value = value[:rows]
        if not is_quantised_part(path):
            value = value.astype(jnp.dtype(dtype))
        stored = np.asarray(value)
        if copies > 1:
            stored = first_copies(stored, copies, head_dim_of(path, decoder.config))
        leaves[tuple(path.split("."))] = stored
    save_leaves(leaves, directory)


def save_leaves(leaves: Mapping[Keys, Any], directory: Path) -> None:
    """Write the arrays of a tree, by their keys, to the new folder `directory`/params with Orbax."""
    import orbax.checkpoint as ocp  # 0.4 s, which a start does not need

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory.absolute() / PARAMS, args=ocp.args.PyTreeSave(nested(leaves)))


def load_orbax(
    directory: Path, config: ModelConfig, wanted: Wanted, progress: Progress
) -> nnx.State:
    """Read the Orbax checkpoint of `directory`, each device its own shards.

    In a training state such as {params, opt_state, step}, only the parameters are read. The table for the tree follows
    from its keys, or from mapping.json (`trees/`).

    Args:
        directory: the model directory; see `orbax_root` for the folder of the checkpoint.
        config: the model; gives the size of the vocabulary without padding.
        wanted: the parameters.
        progress: called after each parameter.

    Raises:
        CheckpointError: a file has other bytes than those of params.sha256, or an object of a bucket was changed; or it
            lists every missing, unexpected, misshapen and unreadable parameter, and those of other types.
        ConfigError: mapping.json is wrong, or the table of the tree does not support the family.
    """
    check_digests(directory)
    tree = read_tree(orbax_root(directory.absolute()) or directory.absolute() / PARAMS)
    if any(keys[-2:] == ("kernel", "values") for keys in tree.leaves):
        if wanted.kind is None:
            problem = (
                "the parameters are quantised, and config.json has no quantization_config for them"
            )
            raise CheckpointError(shown(tree.folder), [problem], remedy=CONVERT_AGAIN)
        wanted = wanted.as_held()
    views, problems = views_of(
        tree, partial(open_stored, tree), wanted.of_model, config, read_mapping(directory)
    )
    if problems:
        raise CheckpointError(shown(tree.folder), problems, remedy=SAVE_AGAIN)
    shapes = flat_parameters(wanted.shapes)
    stacked = with_layers(wanted.of_model)
    sources = view_sources(shapes, views, stacked, wanted.layers.start, config)
    read = filled(shown(tree.folder), wanted, shapes, sources, progress, remedy=SAVE_AGAIN)
    check_unchanged(tree.folder)
    return read


def views_of(
    tree: StoredTree,
    open_array: Callable[[Keys], ArrayOfTree],
    of_model: nnx.State,
    config: ModelConfig,
    mapping: TreeMapping | None,
) -> tuple[dict[str, View], list[str]]:
    """A view of each parameter of a model, with all layers, by the table of the tree; and the problems.

    Args:
        tree: the keys of a checkpoint, or those of a tree in memory.
        open_array: opens the array of some keys, without reading it.
        of_model: shapes of all parameters, stacked.
        config: the model; gives the size of the vocabulary without padding.
        mapping: the mapping of the model directory.

    Raises:
        CheckpointError: no table fits the tree.
        ConfigError: the table of the tree does not support the family.
    """
    shapes = stored_shapes(of_model, config)
    types = flat_parameters(of_model)
    stacked = {path: path in with_layers(of_model) for path in shapes}
    if (
        mapping is None
        and config.decoder is not None
        and (rows := own_class(config.decoder).tree_rows(config))
    ):
        mapping = TreeMapping(TreeTable(config.decoder, rows))
    placed = choose_table(tree, stacked, config, mapping)
    sources, problems = find_arrays(tree, placed, stacked, shapes, config.num_layers)
    views: dict[str, View] = {}
    for path, source in sources.items():
        found = _view(tree, open_array, source, path, shapes[path], types[path].dtype.name)
        if isinstance(found, str):
            problems.append(found)
        else:
            views[path] = found
    return views, problems


def _view(
    tree: StoredTree,
    open_array: Callable[[Keys], ArrayOfTree],
    source: ParameterArrays,
    path: str,
    shape: tuple[int, ...],
    dtype: str,
) -> View | str:
    """The array of a parameter after the operations of its row, or the problem with it."""
    views = []
    for label, keys in source.arrays.items():
        if tree.leaves[keys] not in _ARRAYS:
            return f"{label}: type {tree.leaves[keys]} is not supported, only {', '.join(_FLOATS)}"
        try:
            opened = open_array(keys)
        except Exception as error:  # TensorStore raises several kinds for broken files
            return f"{label}: cannot be read: {problem_of_array(error)}"
        types = (dtype,) if is_quantised_part(path) else _FLOATS
        if (problem := _problem(opened, types)) is not None:
            return f"{label}: {problem}"
        try:
            views.append(_changed(opened.view, source))
        except ValueError as error:
            return f"{label}: {error}; {path} needs {list(shape)}"
    if any(view.shape != views[0].shape for view in views):
        return f"{source.row.source}: the layers have different shapes"
    view = views[0]
    if LAYER in source.row.source and LAYER not in source.row.path:
        view = Stacked(tuple(views))
    if view.shape == shape:
        return view
    has = f"shape {list(view.shape)}"
    if source.is_own:
        return f"{path}: {has}, the model needs {list(shape)}"
    return f"{source.row.source}: {has}, {path} needs {list(shape)}"


def _changed(view: View, source: ParameterArrays) -> View:
    """The operations of a row, on one layer or on the layers of an array. Raises ValueError as operations do."""
    axis = source.row.layer_axis
    lead = 0
    if axis is not None and axis >= len(view.shape):
        raise ValueError(f"shape {list(view.shape)} has no axis {axis} for the layers")
    if axis is not None and source.layer is not None:
        if source.layer >= view.shape[axis]:
            raise ValueError(f"shape {list(view.shape)} has no layer {source.layer} on axis {axis}")
        view = Entry(view, axis, source.layer)
    elif axis is not None:
        lead = 1
        rest = [other for other in range(len(view.shape)) if other != axis]
        if axis:
            view = Transposed(view, (axis, *rest))
    for operation in source.row.operations:
        view = operation(view, lead)
    return view


def open_stored(tree: StoredTree, keys: Keys) -> ArrayOfTree:
    """Open an array without reading its values. Orbax names it by its keys, joined with dots."""
    name = ".".join(keys)
    kvstore = kvstore_of(tree.folder / name)
    if tree.is_ocdbt:
        kvstore = {"driver": "ocdbt", "base": kvstore_of(tree.folder), "path": f"{name}/"}
    spec = {
        "driver": "zarr3" if tree.is_zarr3 else "zarr",
        "kvstore": kvstore,
        # Otherwise the values of a lost file are zeros. Old versions of Orbax leave out chunks of zeros on purpose.
        "fill_missing_data_reads": not tree.has_all_chunks,
    }
    store = tensorstore.open(spec, open=True, read=True).result()
    chunk = tuple(size or 0 for size in store.chunk_layout.read_chunk.shape or ())
    return ArrayOfTree(Stored(store), store.dtype.name, chunk)


def _problem(opened: ArrayOfTree, types: Sequence[str]) -> str | None:
    """The problem of an array's type or of its parts."""
    if opened.dtype not in types:
        return f"type {opened.dtype} is not supported, only {', '.join(types)}"
    shape = opened.view.shape
    chunk = opened.chunk
    if any(part > max(size, 1) for part, size in zip(chunk, shape, strict=False)):
        return f"chunks of {list(chunk)} values are larger than the array"  # and than the memory
    return None
