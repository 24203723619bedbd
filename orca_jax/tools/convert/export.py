"""The tensors of a decoder by their names in Hugging Face directories: what `model/weights.py` reads, written.

Tensors are made one after another, from a table that `families` has for reading. One that several parameters share is
made from all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array

from orca_jax.model.families import FAMILIES
from orca_jax.model.families.base import Weight
from orca_jax.model.files.expert_stacks import OF_EXPERT
from orca_jax.model.matrices.stored import outputs_of
from orca_jax.model.parameters import flat_parameters, is_of_vocabulary, stored_shape
from orca_jax.model.transformer import Decoder
from orca_jax.model.weights import Files, find_source, tensor_shape
from orca_jax.values.config import ModelConfig


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor to write.

    Attributes:
        key: its name in files.
        shape: its shape.
        is_matrix: True for a matrix [outputs, inputs] of a layer that other programs quantise, too.
        read: returns its values, in the type of the parameters, or in float32 if some are multiplied.
    """

    key: str
    shape: tuple[int, ...]
    is_matrix: bool
    read: Callable[[], np.ndarray]


class _ParameterPlace(NamedTuple):
    """A parameter of one layer and expert, and its row of the family's table."""

    weight: Weight
    place: tuple[int, ...]


def exported(decoder: Decoder) -> Iterator[ExportedTensor]:
    """Yield the tensors of a decoder that lies on one device, with stacked layers and plain matrices.

    Args:
        decoder: the model.
    """
    config = decoder.config
    values = flat_parameters(nnx.state(decoder))
    for key, matrices in _by_key(config).items():
        (weight, _), *_ = matrices[0]
        shape = tensor_shape(weight, stored_shape(weight.path, values[weight.path].shape, config))
        if weight.key.endswith(OF_EXPERT):
            shape = (len(matrices), *shape)
        read = partial(_tensor, values, config, matrices, shape)
        yield ExportedTensor(key, shape, _is_matrix(matrices[0]), read)


def _by_key(config: ModelConfig) -> dict[str, list[list[_ParameterPlace]]]:
    """The parameters of each tensor: of each of its matrices, one for an expert or a single one."""
    family = FAMILIES[config.family]
    found: dict[str, list[list[_ParameterPlace]]] = {}
    for weight in family.weights(config):
        source = find_source(weight, family, Files(), config)
        for number, key in enumerate(source.keys):
            layer, expert = divmod(number, source.experts)
            place: tuple[int, ...] = ()
            if weight.stacked:
                place = (layer,)
            if weight.is_of_experts:
                place = (layer, expert)
            matrix = 0
            if weight.key.endswith(OF_EXPERT):
                key = key.removesuffix(f"[{expert}]")
                matrix = expert
            matrices = found.setdefault(key, [])
            if matrix == len(matrices):
                matrices.append([])
            matrices[matrix].append(_ParameterPlace(weight, place))
    return found


def _is_matrix(places: Sequence[_ParameterPlace]) -> bool:
    """True if all parameters of a tensor are matrices of layers, and none a router or a gate of one output."""
    for weight, place in places:
        is_layer = weight.path.endswith(".kernel") and "router" not in weight.path
        if not (weight.transpose and place and (is_layer or weight.is_of_experts)):
            return False
        if weight.key.endswith(OF_EXPERT) or weight.is_conv:
            return False
    return True


def _tensor(
    values: Mapping[str, Array],
    config: ModelConfig,
    matrices: Sequence[Sequence[_ParameterPlace]],
    shape: tuple[int, ...],
) -> np.ndarray:
    """The values of a tensor of this shape."""
    of_one = shape
    if matrices[0][0].weight.key.endswith(OF_EXPERT):
        of_one = shape[1:]
    found = [_matrix(values, config, places, of_one) for places in matrices]
    if of_one is shape:
        return found[0]
    return np.stack(found)


def _matrix(
    values: Mapping[str, Array],
    config: ModelConfig,
    places: Sequence[_ParameterPlace],
    shape: tuple[int, ...],
) -> np.ndarray:
    """A tensor, or the matrix of one expert in it, from all of its parameters."""
    first = places[0].weight
    parts = [_stored(values, config, place) for place in places]
    if first.part is None and not first.first_row:
        part = parts[0]  # those of other parameters are equal
        return (part.T if first.transpose else part).reshape(shape)
    rows = shape[:1] + shape[2:] if first.is_conv else shape
    whole = np.zeros(rows, parts[0].dtype)
    for place, part in zip(places, parts, strict=True):
        weight = place.weight
        turned = whole.T if weight.transpose else whole
        if weight.part is None:
            turned[weight.first_row :] = part
        else:
            turned[..., outputs_of(weight.part)] = part
    return whole.reshape(shape)


def _stored(values: Mapping[str, Array], config: ModelConfig, place: _ParameterPlace) -> np.ndarray:
    """A parameter of one layer and expert, without padding, divided by the factors that loading multiplies it by."""
    path = place.weight.path
    part = np.asarray(values[path][place.place])
    if is_of_vocabulary(path):
        part = part[: config.vocab_size]
    factors = dict(config.weight_factors).get(path)
    if factors is None:
        return part
    of_columns = np.repeat(np.array(factors, np.float32), part.shape[-1] // len(factors))
    return part.astype(np.float32) / of_columns
