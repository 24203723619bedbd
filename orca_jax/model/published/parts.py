"""The tensors that a matrix consists of, and checks of their types and shapes."""

from collections.abc import Mapping, Sequence

import numpy as np

from orca_jax.model.files.safetensors import StoredTensor

type Parts = Mapping[str, StoredTensor]


class Unfit(Exception):
    """Tensors that make no matrix. The text names what is wrong."""


def groups_of(parts: Parts, name: str, inputs: int, count: int) -> np.ndarray | None:
    """The group of each input; None if they are in order. Raises Unfit: a group does not exist."""
    if name not in parts:
        return None
    check_part(parts, name, ("I32",), (inputs,))
    groups = parts[name].all()
    if groups.size and not 0 <= int(groups.min()) <= int(groups.max()) < count:
        raise Unfit(
            f"{name} names groups from {groups.min()} to {groups.max()}, and there are {count}"
        )
    if np.array_equal(groups, np.arange(inputs) // (inputs // count)):
        return None
    return groups


def sizes_of(parts: Parts, name: str, *dtypes: str) -> tuple[int, int]:
    """The rows and columns of a tensor. Raises Unfit: it is missing, of another type, or no matrix."""
    tensor = _present(parts, name, dtypes)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise Unfit(f"{name} has the shape {list(tensor.shape)}, and is not a matrix")
    return tensor.shape[0], tensor.shape[1]


def check_part(parts: Parts, name: str, dtypes: Sequence[str], shape: tuple[int, ...]) -> None:
    """Check the shape of a tensor. Raises Unfit."""
    tensor = _present(parts, name, dtypes)
    if tensor.shape != shape:
        raise Unfit(f"{name} has the shape {list(tensor.shape)}, and {list(shape)} is needed")


def _present(parts: Parts, name: str, dtypes: Sequence[str]) -> StoredTensor:
    if name not in parts:
        raise Unfit(f"{name} is missing")
    tensor = parts[name]
    if tensor.dtype not in dtypes:
        raise Unfit(f"{name} has the type {tensor.dtype}, and must have {' or '.join(dtypes)}")
    return tensor
