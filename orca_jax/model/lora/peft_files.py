"""Adapters in the format of PEFT: read, checked against the model, and arranged as the devices hold them."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import Weight
from orca_jax.model.files.opened import LocalFile
from orca_jax.model.files.safetensors import StoredTensor, read_header
from orca_jax.model.files.stripes import DTYPES, FileMatrix
from orca_jax.model.lora.peft_config import PeftConfig, read_config
from orca_jax.model.lora.stacks import (
    group_of,
    groups_of,
    place_matrices,
    stored_width,
    width_of,
    zero_values,
)
from orca_jax.model.parameters import layers_of
from orca_jax.values.checks import open_regular
from orca_jax.values.config import DType, LoraConfig, ModelConfig
from orca_jax.values.errors import CheckpointError, system_message
from orca_jax.values.layer_config import PAGED_MIXERS

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SIDES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_REMEDIES = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding": "adapters of the vocabulary are not supported",
    "modules_to_save": "modules_to_save is not supported",
    "lm_head": "adapters of the vocabulary are not supported",
    "embed": "adapters of the vocabulary are not supported",
    "wte": "adapters of the vocabulary are not supported",
    ".bias": "trained biases are not supported",
}
"""Reasons for the refusal of a tensor, by a part of its name."""

# of a header for a tensor: its name in at most 250 characters, type, shape and offsets
_ENTRY_BYTES = 400
_METADATA_BYTES = 2**16  # of a header
_MOST_ITEM_BYTES = max(dtype.itemsize for dtype in DTYPES.values())


@dataclass(frozen=True)
class AdapterValues:
    """An adapter on the host.

    Attributes:
        digest: a digest of its configuration and tensors; equal digests mean equal results.
        rank: the rank before padding to the largest rank.
        values: see `stacks.value_shapes`, for all layers of the model.
        left_out: parts of the whole model that the decoder does not have, such as vision_tower; their tensors were not
            read.
    """

    digest: str
    rank: int
    values: Mapping[str, NDArray[Any]]
    left_out: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return sum(each.nbytes for each in self.values.values())


class _AdaptedModule(NamedTuple):
    """A linear layer of the decoder, as a module of a checkpoint, or a part of one."""

    target: str
    layer: int
    weight: Weight


class _Tensors(NamedTuple):
    """The tensors of a file: "A" and "B" of each module of the decoder, and the parts that are left out."""

    modules: Mapping[str, Mapping[str, FileMatrix]]
    left_out: tuple[str, ...]


def read_adapter(
    directory: Path, model: ModelConfig, lora: LoraConfig, dtype: DType
) -> AdapterValues:
    """Read an adapter.

    The names, types, shapes and places of all tensors are checked before the first one is read, so that a wrong file
    costs no more than its header. Its size is limited: parsing a header holds the interpreter.

    Args:
        directory: has adapter_config.json and adapter_model.safetensors.
        model: the model as the devices hold it, all layers.
        lora: the largest rank.
        dtype: the type of the arrays.

    Raises:
        CheckpointError: the files cannot be read, need something that is not supported, or do not fit the model. It
            lists every problem.
    """
    config = read_config(directory)
    if config.rank > lora.max_rank:
        problem = f"r {config.rank} is more than max_lora_rank {lora.max_rank}; start with a larger --max-lora-rank"
        raise CheckpointError(str(directory), [problem])
    try:
        with os.fdopen(open_regular(directory / WEIGHTS), "rb") as file:
            return _read(directory, LocalFile(file.fileno()), config, model, lora, dtype)
    except FileNotFoundError:
        reason = "missing"
        if (directory / "adapter_model.bin").exists():
            reason = "only adapter_model.bin: pickles are not read, since they may run code"
        problem = f"{WEIGHTS}: {reason}; save the adapter with PEFT's save_pretrained(safe_serialization=True)"
        raise CheckpointError(str(directory), [problem]) from None
    except OSError as error:
        raise CheckpointError(
            str(directory), [f"{WEIGHTS}: cannot be read: {system_message(error)}"]
        ) from None


def _read(
    directory: Path,
    file: LocalFile,
    config: PeftConfig,
    model: ModelConfig,
    lora: LoraConfig,
    dtype: DType,
) -> AdapterValues:
    places = _places(model)
    problems = list[str]()
    matrices = {
        (each.weight.key, each.layer): each for each in chain.from_iterable(places.values())
    }
    # Two tensors for each matrix, and as many again for parts that are left out.
    stored, length = read_header(file, _METADATA_BYTES + 4 * len(matrices) * _ENTRY_BYTES)
    tensors = _check(stored, places, model, config.rank, problems)
    numbers = sum(_numbers(each, model, config.rank) for each in matrices.values())
    most = 8 + length + 2 * numbers * _MOST_ITEM_BYTES
    if file.size > most and not problems:
        problems.append(
            f"{WEIGHTS} has {file.size} bytes; with this r, one of this model has at most {most}"
        )
    if not problems:
        values, digest = _arrange(tensors, places, config, model, lora, dtype, problems)
    if problems:
        raise CheckpointError(str(directory), problems)
    return AdapterValues(digest, config.rank, values, tensors.left_out)


def _check(
    stored: Mapping[str, StoredTensor],
    places: Mapping[str, list[_AdaptedModule]],
    model: ModelConfig,
    rank: int,
    problems: list[str],
) -> _Tensors:
    """The tensors of the decoder, with names, types and shapes that fit; or problems."""
    ignored = FAMILIES[model.family].ignored
    with_states = _modules_with_states(model) - places.keys()
    modules: dict[str, dict[str, FileMatrix]] = {}
    left_out: set[str] = set()
    for key in sorted(stored):
        module, side = _module_and_side(key)
        if side is not None and module not in places and ignored.fullmatch(f"{module}.weight"):
            left_out.add(module.removeprefix("model.").partition(".")[0])
            continue
        tensor = stored[key]
        kind = tensor.dtype
        if module in with_states:
            problems.append(f"{key}: adapters of layers with states are not supported")
        elif side is None or module not in places:
            problems.append(f"{key}: {_advice(key)}")
        elif kind not in DTYPES:
            problems.append(f"{key}: type {kind[:20]} is not supported, only {', '.join(DTYPES)}")
        elif len(tensor.shape) != 2:
            problems.append(f"{key}: shape {list(tensor.shape)[:9]} is not that of a matrix")
        else:
            modules.setdefault(module, {})[side] = tensor.matrix(key)
    if not modules and not problems:
        only = " and ".join(sorted(left_out))
        found = f"tensors of {only} alone, which is left out" if left_out else "no tensors"
        problems.append(f"{WEIGHTS} has {found}")
    has_all = not problems
    for module, sides in modules.items():
        if problem := _problem_of_module(sides, places[module], model, rank, has_all):
            problems.append(f"{module}: {problem}")
    return _Tensors(modules, tuple(sorted(left_out)))


def _module_and_side(key: str) -> tuple[str, str | None]:
    """The module of a tensor, and "A" or "B"; None for another tensor."""
    name = key.removeprefix(_PREFIX)
    for suffix, side in _SIDES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), side
    return name, None


def _advice(key: str) -> str:
    """The reason for which a tensor of this name is not read."""
    for part, reason in _REMEDIES.items():
        if part in key:
            return reason
    return "no linear layer of this model"


def _places(model: ModelConfig) -> dict[str, list[_AdaptedModule]]:
    """The linear layers of the decoder by the names of modules in checkpoints."""
    paths: dict[str, str] = {}
    for name, group in groups_of(model).items():
        part = name.removesuffix("_out")
        paths |= {f"blocks.{part}.{target}.kernel": target for target in group.targets}
    places: dict[str, list[_AdaptedModule]] = {}
    for weight in FAMILIES[model.family].weights(model):
        if weight.path in paths:
            for module, layer in _modules(weight, model):
                places.setdefault(module, []).append(
                    _AdaptedModule(paths[weight.path], layer, weight)
                )
    return places


def _modules(weight: Weight, model: ModelConfig) -> Iterator[tuple[str, int]]:
    """The names in checkpoints of the modules with a weight, and the layer of each."""
    for layer in layers_of(weight.path, model):
        for key in (weight.key, *weight.others):
            for prefix in FAMILIES[model.family].prefixes:
                yield prefix + key.format(layer=layer).removesuffix(".weight"), layer


def _modules_with_states(model: ModelConfig) -> set[str]:
    """The modules of mixers that keep states."""
    mixers = tuple(f"blocks.{name}." for name in set(model.mixers) - PAGED_MIXERS)
    found: set[str] = set()
    for weight in FAMILIES[model.family].weights(model):
        if weight.path.startswith(mixers):
            found.update(module for module, _ in _modules(weight, model))
    return found


def _arrange(
    tensors: _Tensors,
    places: Mapping[str, list[_AdaptedModule]],
    config: PeftConfig,
    model: ModelConfig,
    lora: LoraConfig,
    dtype: DType,
    problems: list[str],
) -> tuple[dict[str, NDArray[Any]], str]:
    """Read the tensors. Returns the arrays of the adapter and a digest, or adds problems. Raises OSError."""
    out = zero_values(model, lora, dtype)
    digest = hashlib.sha256(repr((config.rank, config.scale)).encode())
    for module, sides in tensors.modules.items():
        matrices = {}
        for side, matrix in sorted(sides.items()):
            values = np.empty(_shape(matrix), matrix.dtype)
            matrix.read_into(0, values)
            digest.update(repr((matrix.key, matrix.dtype.name, _shape(matrix))).encode())
            digest.update(values.view(np.uint8))
            matrices[side] = values.astype(np.float32)
            if not np.isfinite(matrices[side]).all():
                problems.append(f"{matrix.key}: has values that are not finite")
        with np.errstate(over="ignore"):  # found below
            for place in places[module]:
                _place_values(
                    out, place, matrices["A"], matrices["B"] * config.scale, model, lora.max_rank
                )
    infinite = [
        name for name, each in out.items() if not np.isfinite(each.astype(np.float32)).all()
    ]
    if infinite and not problems:
        problems.append(f"values of {', '.join(infinite)} are too large for {dtype}")
    return out, digest.hexdigest()


def _shapes(place: _AdaptedModule, model: ModelConfig, rank: int) -> dict[str, tuple[int, int]]:
    """The shapes of both matrices of a module."""
    _, _, group = group_of(place.target, model)
    part = place.weight.part
    outputs = part.num_columns if part else stored_width(place.target, model)
    return {"A": (rank, width_of(group.inputs, model)), "B": (outputs, rank)}


def _numbers(place: _AdaptedModule, model: ModelConfig, rank: int) -> int:
    return sum(rows * columns for rows, columns in _shapes(place, model, rank).values())


def _problem_of_module(
    sides: Mapping[str, FileMatrix],
    places: list[_AdaptedModule],
    model: ModelConfig,
    rank: int,
    has_all: bool,
) -> str | None:
    """The problem of the matrices of a module. One may miss only if another tensor has a problem: not `has_all`."""
    if len(sides) < 2:
        return "lora_A and lora_B must both be there" if has_all else None
    for side, needed in _shapes(places[0], model, rank).items():
        if _shape(sides[side]) != needed:
            return f"lora_{side} has shape {list(_shape(sides[side]))}, the model and r need {list(needed)}"
    return None


def _shape(matrix: FileMatrix) -> tuple[int, int]:
    return matrix.num_rows, matrix.num_columns


def _place_values(
    out: Mapping[str, NDArray[Any]],
    place: _AdaptedModule,
    a: np.ndarray,
    b: np.ndarray,
    model: ModelConfig,
    max_rank: int,
) -> None:
    """Write the matrices of one module, or the part of one, into the arrays of the adapter."""
    if place.weight.part is not None:
        b = b[place.weight.part.column(np.arange(stored_width(place.target, model)))]
    place_matrices(out, place.target, place.layer, a, b, model, max_rank)
