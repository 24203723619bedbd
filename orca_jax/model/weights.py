"""Load Hugging Face directories: safetensors, one file or many, directly into sharded arrays (`leaves/`)."""

import logging
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from orca_jax.helpers.buckets.views import shown
from orca_jax.helpers.console import Progress
from orca_jax.helpers.hub import INDEX, SINGLE
from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import TensorSum, Weight
from orca_jax.model.families.family import Family
from orca_jax.model.files.expert_stacks import has_stacks, oriented, with_matrices
from orca_jax.model.files.folder import SafetensorsFolder
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.files.stripes import DTYPES, FileMatrix, TensorRows
from orca_jax.model.files.sums import with_sums
from orca_jax.model.leaves.base import Source
from orca_jax.model.leaves.fill import filled
from orca_jax.model.leaves.rows import RowSource
from orca_jax.model.matrices.packed import held_values, plain_shape, width_in_file
from orca_jax.model.parameters import (
    Wanted,
    first_line,
    flat_parameters,
    layers_of,
    num_copies,
    path_of,
    split_layer,
    stored_shape,
)
from orca_jax.values.config import DType, ModelConfig
from orca_jax.values.errors import CheckpointError

_COMPARED = 2**22  # numbers of a table in memory at once

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,9})\.")

logger = logging.getLogger(__name__)


@runtime_checkable
class FileTensor(Protocol):
    """The type of a tensor, in the words of safetensors, and its shape."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass
class Files:
    """Open files of a checkpoint, with their tensors by key. `unreadable` holds the keys in broken files.

    `rows` has the vectors and matrices of numbers, and `optional` the keys that may be left unread.
    """

    tensors: dict[str, FileTensor] = field(default_factory=dict)
    rows: dict[str, TensorRows] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ParameterSource:
    """The source of a parameter: a row of the family's table, and the key of each layer (or a single key).

    If each layer has `experts` tensors, the keys of a layer are next to each other.
    """

    weight: Weight
    keys: tuple[str, ...]
    experts: int = 1


def load_safetensors(
    folder: SafetensorsFolder, config: ModelConfig, wanted: Wanted, progress: Progress
) -> nnx.State:
    """Read a Hugging Face directory, each device its own shards.

    Args:
        folder: its files.
        config: the model; its family gives the names of the tensors.
        wanted: the parameters.
        progress: called after each parameter.

    Raises:
        ConfigError: there are only pickled weights. They are refused, since loading them may run code.
        CheckpointError: lists every missing, unexpected, misshapen and unreadable tensor.
    """
    with ExitStack() as stack:
        family = FAMILIES[config.family]
        table = family.weights(config)
        sums = None
        if family.sums is not None:
            sums = family.sums(config)
        files = open_files(
            folder, stack, has_stacks=has_stacks(table), sums=sums, prefixes=family.prefixes
        )
        directory = folder.directory
        if (directory / SINGLE).is_file() and (directory / INDEX).exists():
            logger.info(
                "%s has %s and %s: the single file is served, as by transformers",
                directory,
                SINGLE,
                INDEX,
            )
        return load_files(
            shown(directory), files, oriented(table, files.rows), config, wanted, progress
        )


def load_files(
    source: str,
    files: Files,
    table: tuple[Weight, ...],
    config: ModelConfig,
    wanted: Wanted,
    progress: Progress,
    others: Mapping[str, Source] | None = None,
) -> nnx.State:
    """Read all parameters from open files.

    Args:
        source: the directory or file, for errors.
        files: the open files.
        table: the family's table of weights, or a table of the same weights in another orientation.
        config: the model.
        wanted: the parameters, each with its shards on the devices of this process.
        progress: called after each parameter.
        others: the sources of those that are not in the table.

    Raises:
        CheckpointError: lists every missing, unexpected, misshapen and unreadable tensor.
    """
    family = FAMILIES[config.family]
    if not files.tensors:
        raise CheckpointError(source, files.problems or ["the files contain no tensors"])
    if problem := too_many_layers(config, len(files.tensors) + len(files.unreadable)):
        raise CheckpointError(source, [*files.problems, problem])
    sources = {weight.path: find_source(weight, family, files, config) for weight in table}
    problems = files.problems + _compare(
        sources, flat_parameters(wanted.of_model), family, files, config
    )
    if problems:
        raise CheckpointError(source, problems)
    held = {path_of(keys): variable for keys, variable in nnx.to_flat_state(wanted.shapes)}
    shapes = flat_parameters(wanted.shapes)
    others = others or {}
    matrices = dict[str, RowSource]()
    first = wanted.layers.start
    for path, variable in held.items():
        if path in others:
            continue
        matrices[path] = _matrices(path, variable, sources, files, config, first)
        if not matrices[path].packed_width:
            shapes[path] = plain_shape(variable)
    factors = dict(config.weight_factors)

    def as_held(path: str, array: Array) -> Array:
        if own := factors.get(split_layer(path)[0]):
            array = _multiplied(array, own)
        if path in others or matrices[path].packed_width:
            return array
        return held_values(held[path], array)

    return filled(source, wanted, shapes, {**matrices, **others}, progress, as_held)


def _multiplied(array: Array, factors: tuple[float, ...]) -> Array:
    """An array with each of the equal parts of its last axis multiplied by a factor."""
    columns = np.repeat(np.array(factors, np.float32), array.shape[-1] // len(factors))
    return (array.astype(jnp.float32) * columns).astype(array.dtype)


def too_many_layers(config: ModelConfig, num_tensors: int) -> str | None:
    """The problem of fewer tensors than layers or experts: otherwise there is one line for each of a billion."""
    count = _num_experts(config)
    if config.num_layers * count <= num_tensors:
        return None
    layers = f"{config.num_layers} layers"
    if count > 1:
        layers = f"{layers} of {count} experts"
    return f"config.json: {layers}, but the files contain {num_tensors} tensors"


def _num_experts(config: ModelConfig) -> int:
    return 1 if config.experts is None else config.experts.count


def with_true_head(folder: SafetensorsFolder, config: ModelConfig, dtype: DType) -> ModelConfig:
    """The configuration, untied if the files hold an unembedding unequal to the embedding.

    Some fine-tuned models have their own head, and a configuration with a tied one. As in transformers, both are
    compared in the type of loading, and the files decide.

    Raises:
        ConfigError: as in `load_safetensors`.
        CheckpointError: the files cannot be found or opened.
    """
    if not config.tied_embeddings:
        return config
    family = FAMILIES[config.family]
    (embedding,) = (weight for weight in family.weights(config) if weight.path == "embedding.table")
    with ExitStack() as stack:
        files = open_files(folder, stack)
        (key,) = find_source(embedding, family, files, config).keys
        head = next((name for name in _head_names(family, config) if name in files.tensors), None)
        if key not in files.tensors or head is None:
            return config
        try:
            same = (
                key in files.rows
                and head in files.rows
                and _is_equal(files.rows[key], files.rows[head], dtype)
            )
        except OSError as error:
            raise CheckpointError(
                shown(folder.directory), [f"{head}: cannot be read: {first_line(error)}"]
            ) from None
    if same:
        return config
    logger.warning(
        "%s: %s differs from the embedding: it is used, although config.json ties them",
        folder.directory,
        head,
    )
    return replace(config, tied_embeddings=False)


def _head_names(family: Family, config: ModelConfig) -> tuple[str, ...]:
    """Names of the tensor with the unembedding, in files that have one."""
    untied = family.weights(replace(config, tied_embeddings=False))
    (head,) = (weight for weight in untied if weight.path == "head.table")
    return (head.key, *head.others)


def _is_equal(one: TensorRows, other: TensorRows, dtype: DType) -> bool:
    """Compare two tables in `dtype`, a part of the rows at a time. Raises OSError."""
    if (one.num_rows, one.num_columns) != (other.num_rows, other.num_columns):
        return False  # what is wrong is reported with the other problems of the files
    step = max(1, _COMPARED // max(1, one.num_columns))
    for start in range(0, one.num_rows, step):
        parts = []
        for table in (one, other):
            rows = np.empty((min(step, table.num_rows - start), table.num_columns), table.dtype)
            table.read_into(start, rows)
            parts.append(rows.astype(jnp.dtype(dtype)))
        if not np.array_equal(parts[0], parts[1]):
            return False
    return True


def open_files(
    folder: SafetensorsFolder,
    stack: ExitStack,
    *,
    has_stacks: bool = False,
    sums: Mapping[str, Sequence[TensorSum]] | None = None,
    prefixes: Sequence[str] = (),
) -> Files:
    """Open all files, and record the broken ones.

    Args:
        folder: the files of a model directory.
        stack: closes the files.
        has_stacks: some tensors have matrices of all experts.
        sums: tensors that are elsewhere in files, or sums; see `with_sums`.
        prefixes: those of the family, for `sums`.
    """
    files = Files()
    stored = dict[str, StoredTensor]()
    for number, (name, keys) in enumerate(folder.names.items()):
        try:
            tensors = folder.tensors(name, number, stack)
        except OSError as error:
            files.problems.append(f"{name}: cannot be read: {first_line(error)}")
            files.unreadable |= keys
            continue
        found = tensors.keys()
        files.problems += [
            f"{key}: missing from {name}, although the index lists it there"
            for key in sorted(keys - found)
        ]
        files.unreadable |= keys - found
        stored |= tensors
        files.rows |= _rows(tensors)
    matrices: dict[str, TensorRows] = {}
    if has_stacks:
        stored, matrices = with_matrices(stored)
    if sums is not None:
        summed = with_sums(stored, files.rows, sums, prefixes)
        stored, files.rows, problems = summed
        files.problems += problems
    files.tensors |= stored
    files.rows |= matrices
    return files


def _rows(tensors: Mapping[str, StoredTensor]) -> dict[str, FileMatrix]:
    """The numbers, vectors and matrices of a file, and the taps of its convolutions, which are matrices too."""
    found = {}
    for key, tensor in tensors.items():
        is_conv = len(tensor.shape) == 3 and tensor.shape[1] == 1
        if tensor.dtype in DTYPES and (len(tensor.shape) < 3 or is_conv):
            found[key] = tensor.matrix(key)
    return found


def find_source(
    weight: Weight, family: Family, files: Files, config: ModelConfig
) -> ParameterSource:
    """The keys of a parameter's tensors. Each has the first of the family's prefixes that gives an existing key."""
    layers = layers_of(weight.path, config) if weight.stacked else (None,)
    experts = range(_num_experts(config)) if weight.is_of_experts else (None,)
    prefixes = family.prefixes if weight.prefixed else ("",)
    keys = []
    places: Sequence[str | int] = range(config.num_layers)
    if family.layer_names is not None:
        places = family.layer_names(config)
    for layer, expert in product(layers, experts):
        place = None if layer is None else places[layer]
        names = [name.format(layer=place, expert=expert) for name in (weight.key, *weight.others)]
        candidates = [prefix + name for name, prefix in product(names, prefixes)]
        known = (key for key in candidates if key in files.tensors or key in files.unreadable)
        keys.append(next(known, candidates[0]))
    if weight.instead is not None and files.tensors.keys().isdisjoint(keys):
        other = find_source(weight.instead, family, files, config)
        if other.keys[0] in files.tensors:
            return other
    return ParameterSource(weight, tuple(keys), len(experts))


def _matrices(
    path: str,
    variable: nnx.Variable[Any],
    sources: Mapping[str, ParameterSource],
    files: Files,
    config: ModelConfig,
    first: int,
) -> RowSource:
    """The matrices of a parameter of a stage with the layers from `first` on."""
    path, layer = split_layer(path)
    weight = sources[path].weight
    keys = sources[path].keys
    each = sources[path].experts
    is_stack = weight.stacked and layer is None
    if weight.stacked:
        begin = bisect_left(layers_of(path, config), first + (layer or 0))
        count = variable.get_value().shape[0] if is_stack else 1
        keys = keys[begin * each : (begin + count) * each]
    found = tuple(files.rows[key] for key in keys)
    width = 0
    is_plain = weight.part is None and not weight.first_row and num_copies(path, config) == 1
    if is_plain and path not in dict(config.weight_factors):
        width = width_in_file(variable, found[0].num_rows, is_transposed=weight.transpose)
    return RowSource(weight, found, is_stack + weight.is_of_experts, config, width)


def _compare(
    sources: Mapping[str, ParameterSource],
    wanted: Mapping[str, Any],
    family: Family,
    files: Files,
    config: ModelConfig,
) -> list[str]:
    """List problems with keys, shapes and types; a tensor shared by several parameters is listed once."""
    problems: dict[str, None] = {}
    used: set[str] = set()
    for path, source in sources.items():
        shape = tensor_shape(source.weight, stored_shape(path, wanted[path].shape, config))
        used.update(source.keys)
        for key in source.keys:
            if key in files.unreadable:
                continue
            if key not in files.tensors:
                problems[f"{key}: missing"] = None
                continue
            tensor = files.tensors[key]
            if tensor.shape != shape:
                problems[f"{key}: shape {list(tensor.shape)}, the model needs {list(shape)}"] = None
            if tensor.dtype not in DTYPES:
                problems[
                    f"{key}: type {tensor.dtype} is not supported, only {', '.join(DTYPES)}"
                ] = None
    if config.tied_embeddings:
        used.update(_head_names(family, config))  # some files repeat the embedding
    for key in sorted(set(files.tensors) - used):
        layer = _LAYER.match(key)
        is_further = layer is not None and int(layer[1]) >= config.num_layers
        is_ignored = key in files.optional or family.ignored.fullmatch(key) is not None
        if not (is_further and family.has_further_layers) and not is_ignored:
            problems[f"{key}: unexpected"] = None
    return list(problems)


def tensor_shape(weight: Weight, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in the checkpoint, from the shape of the parameter."""
    *rest, last = shape[weight.stacked + weight.is_of_experts :]
    if weight.is_scalar:
        return ()
    if weight.first_row:
        rest[0] += weight.first_row
    if weight.part is not None:
        last = weight.part.num_columns
    whole = (*rest, last)
    if weight.transpose:
        whole = whole[::-1]
    if weight.is_row:
        whole = (1, *whole)
    if not weight.is_conv:
        return whole
    return (whole[0], 1, *whole[1:])
