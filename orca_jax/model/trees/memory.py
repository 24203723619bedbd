"""Trees of parameters in memory: the keys and the arrays of a state of `flax.nnx`, of a module, or of nested dicts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from orca_jax.model.orbax_files import Keys, StoredTree
from orca_jax.model.trees.views import Bounds, PendingRead, ViewShape

NAME = "the tree of parameters"
"""The name of a tree in memory in messages."""


@dataclass(frozen=True)
class InMemory:
    """An array of JAX or NumPy. A read copies the part, so that the caller may change or donate the array later.

    The first read takes all values to the host, since the parameters of all layers may be in one array.
    """

    array: Any

    @property
    def shape(self) -> ViewShape:
        """The shape of the array."""
        return tuple(self.array.shape)

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part."""
        return lambda: np.array(
            self._host[tuple(slice(bound.start, bound.stop) for bound in bounds)]
        )

    @cached_property
    def _host(self) -> np.ndarray:
        return on_host(self.array)


def on_host(array: Any) -> np.ndarray:
    """The values of an array. The caller's array of JAX keeps no copy of them, and no program is compiled."""
    if isinstance(array, jax.Array):
        shards = [shard.data for shard in array.addressable_shards]
        array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return np.asarray(array)


def flat_tree(tree: Any) -> dict[Keys, Any]:
    """The leaves of a tree by their keys. Variables of `flax.nnx` are replaced by their values."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    if isinstance(tree, nnx.State):
        flat = nnx.to_flat_state(tree)
        return {tuple(map(str, keys)): variable.get_value() for keys, variable in flat}
    return dict(_leaves(tree, ()))


def _leaves(node: Any, keys: Keys) -> Iterator[tuple[Keys, Any]]:
    if isinstance(node, Mapping):
        for key, inner in node.items():
            yield from _leaves(inner, (*keys, str(key)))
    elif isinstance(node, Sequence) and not isinstance(node, str | bytes):
        for index, inner in enumerate(node):
            yield from _leaves(inner, (*keys, str(index)))
    elif isinstance(node, nnx.State):
        yield from ((keys + inner, leaf) for inner, leaf in flat_tree(node).items())
    else:
        yield keys, node.get_value() if isinstance(node, nnx.Variable) else node


def nested(leaves: Mapping[Keys, Any]) -> dict[str, Any]:
    """Nested dicts of leaves by their keys."""
    tree: dict[str, Any] = {}
    for keys, leaf in leaves.items():
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return tree


def stored_tree(leaves: Mapping[Keys, Any]) -> StoredTree:
    """The description of a tree in memory, as of a checkpoint."""
    kinds = {
        keys: "jax.Array" if is_array(leaf) else type(leaf).__name__
        for keys, leaf in leaves.items()
    }
    return StoredTree(Path(NAME), kinds, is_ocdbt=False, is_zarr3=False, has_all_chunks=True)


def is_array(leaf: Any) -> bool:
    """True for arrays of JAX and NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray) and not jnp.issubdtype(
        leaf.dtype, jax.dtypes.extended
    )


def check_readable(array: Any) -> None:
    """Check that an array has values in this process. Raises ValueError."""
    if isinstance(array, jax.Array) and array.is_deleted():
        raise ValueError("the array was deleted; pass the tree before its arrays are donated")
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise ValueError("other processes have parts of the array")
