"""Adapters in memory, as Tunix trains them with qwix: `layers/0/attn/q_proj/w_lora_a` and `w_lora_b`."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from orca_jax.model.lora.peft_files import AdapterValues
from orca_jax.model.lora.stacks import (
    group_of,
    groups_of,
    place_matrices,
    stored_width,
    width_of,
    zero_values,
)
from orca_jax.model.orbax_files import Keys
from orca_jax.model.trees import tunix
from orca_jax.model.trees.memory import check_readable, flat_tree, is_array, on_host
from orca_jax.model.trees.rows import LAYER, Pick, TreeRow
from orca_jax.values.config import DType, LoraConfig, ModelConfig
from orca_jax.values.errors import CheckpointError
from orca_jax.values.lora_request import AdapterTree

NAME = "the tree of the adapter"
"""The name of a tree in messages."""

_SIDE = re.compile(r"(.+)_lora_([ab])")


class _Adapted(NamedTuple):
    """A linear layer of the decoder, and its row."""

    target: str
    layer: int
    row: TreeRow


def read_tree(
    tree: AdapterTree, model: ModelConfig, lora: LoraConfig, dtype: DType
) -> AdapterValues:
    """Copy the adapters of a tree to the host, and nothing else of it.

    Args:
        tree: the adapters, in the layout of Tunix.
        model: the model as the devices hold it, all layers.
        lora: the largest rank.
        dtype: the type of the arrays.

    Raises:
        CheckpointError: the adapters do not fit the model, with every problem.
        ConfigError: Tunix has no models of this family.
    """
    places = dict(_places(model))
    sides, problems = _sides(tree, places)
    values = zero_values(model, lora, dtype)
    digest = hashlib.sha256(repr(tree.alpha).encode())
    largest = 0
    for module, pair in sorted(sides.items()):
        a, b = (_matrix(pair, side) for side in "ab")
        problem = _problem(a, b, places[module], model, lora.max_rank)
        if problem is not None:
            problems.append(f"{module}: {problem}")
            continue
        rank = a.shape[-1]
        largest = max(largest, rank)
        digest.update(repr((module, a.shape, b.shape)).encode() + a.tobytes() + b.tobytes())
        for place in places[module]:
            scaled = _outputs(b, place) * np.float32(tree.alpha / rank)
            whole = a.reshape(-1, rank).T
            place_matrices(values, place.target, place.layer, whole, scaled, model, lora.max_rank)
    if not sides and not problems:
        problems.append("it has no adapters: their arrays end in _lora_a and _lora_b")
    if problems:
        raise CheckpointError(NAME, problems)
    return AdapterValues(digest.hexdigest(), largest, values)


def _sides(
    tree: AdapterTree, places: Mapping[str, list[_Adapted]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The arrays "a" and "b" of each module, and the problems of names and kinds."""
    sides: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for keys, leaf in flat_tree(tree.params).items():
        name = side_of(keys)
        if name is None:
            continue
        module, side = name
        if module not in places:
            problems.append(f"{module}: no linear layer of this model that takes adapters")
        elif not is_array(leaf):
            problems.append(f"{module}: {type(leaf).__name__} is not an array")
        else:
            sides.setdefault(module, {})[side] = leaf
    return sides, problems


def side_of(keys: Keys) -> tuple[str, str] | None:
    """The module of an array of an adapter and its side, "a" or "b"; None for another array."""
    if keys[-1:] == ("value",):
        keys = keys[:-1]
    found = _SIDE.fullmatch("/".join(keys))
    return found and (found[1], found[2])


def _places(model: ModelConfig) -> Iterator[tuple[str, list[_Adapted]]]:
    """The linear layers by the names of their arrays in trees."""
    targets = {}
    for name, group in groups_of(model).items():
        part = name.removesuffix("_out")
        targets.update({f"blocks.{part}.{target}.kernel": target for target in group.targets})
    found: dict[str, list[_Adapted]] = {}
    for row in tunix.table(model).rows:
        for layer in range(model.num_layers if row.path in targets else 0):
            module = row.source.replace(LAYER, str(layer))
            found.setdefault(module, []).append(_Adapted(targets[row.path], layer, row))
    yield from found.items()


def _matrix(pair: Mapping[str, Any], side: str) -> np.ndarray:
    """The values of a side; an empty array without it."""
    if side not in pair:
        return np.empty(0, np.float32)
    check_readable(pair[side])
    return on_host(pair[side]).astype(np.float32)


def _outputs(b: np.ndarray, place: _Adapted) -> np.ndarray:
    """The matrix B of one linear layer, [outputs, rank], of an array with one or several."""
    for operation in place.row.operations:
        if isinstance(operation, Pick):  # of an axis that comes before the inputs
            b = b.take(operation.number, axis=1 + operation.axis)
    return b.reshape(len(b), -1).T


def _problem(
    a: np.ndarray, b: np.ndarray, places: list[_Adapted], model: ModelConfig, max_rank: int
) -> str | None:
    """The reason for which the matrices of a module do not fit it."""
    if not a.size or not b.size:
        return "_lora_a and _lora_b must both be there"
    rank = a.shape[-1]
    if rank > max_rank:
        return f"rank {rank} is more than max_lora_rank {max_rank}: start with a larger one"
    target = places[0].target
    inputs = width_of(group_of(target, model)[2].inputs, model)
    outputs = sum(stored_width(place.target, model) for place in places)
    if (a.size, b.size, len(b)) != (inputs * rank, rank * outputs, rank):
        return (
            f"shapes {list(a.shape)} and {list(b.shape)} do not fit: the model has {inputs} inputs and {outputs} "
            "outputs"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return "has values that are not finite"
    return None
