"""Access to the decoder's parameters by path, for the loaders."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array

from orca_jax.model.matrices.quantise import quantised_parts
from orca_jax.values.config import ModelConfig, Quantization

_LAYER = re.compile(r"blocks\.(\d+)\.(.+)")


class Wanted(NamedTuple):
    """The parameters to load: those of a model, or of one pipeline stage.

    The files are compared with the whole model, so that each stage finds the same problems.
    """

    shapes: nnx.State  # `ShapeDtypeStruct` with shardings, padded; values are cast to its types
    of_model: nnx.State  # the same for all stages
    layers: range  # of the stage
    # of the decoder; if it has one, the trees above are plain, and these quantised:
    kind: Quantization | None
    held: nnx.State
    held_of_model: nnx.State

    def as_held(self) -> "Wanted":
        """The same from files with quantised parameters."""
        return self._replace(shapes=self.held, of_model=self.held_of_model)

    def make_parts(self) -> Callable[[str, Array], dict[str, Array]]:
        """A function `(path, array) -> parts`: the decoder's parameters, by path, that a plain parameter becomes."""
        return partial(quantised_parts, held=flat_parameters(self.held), kind=self.kind)

    def filled(self, values: Mapping[str, Array]) -> nnx.State:
        """The decoder's parameters, from all parts by path."""
        return with_parameters(self.held, values)


def path_of(keys: Iterable[object]) -> str:
    """The path of a parameter, such as "blocks.mlp.up.kernel", from its keys in a state."""
    return ".".join(map(str, keys))


def with_layers(state: nnx.State) -> frozenset[str]:
    """The paths of the parameters with the layers as their first axis."""
    flat = nnx.to_flat_state(state)
    return frozenset(
        path_of(keys)
        for keys, variable in flat
        if variable.get_metadata("axes", ())[:1] == ("layers",)
    )


def split_layer(path: str) -> tuple[str, int | None]:
    """The path of a parameter with all layers, and the layer; None if `path` is not that of a single layer."""
    match = _LAYER.fullmatch(path)
    if match is None:
        return (path, None)
    return (f"blocks.{match[2]}", int(match[1]))


def layers_of(path: str, config: ModelConfig) -> tuple[int, ...]:
    """The layers of a model that have a parameter, by its path with all layers: those with its part, or all."""
    part = ""
    if path.startswith("blocks."):
        part = path.split(".")[1]
    return config.layers_with(part) or tuple(range(config.num_layers))


def flat_parameters(state: nnx.State) -> dict[str, Any]:
    """The value of each parameter by its path, in the order of paths."""
    return {path_of(keys): variable.get_value() for keys, variable in nnx.to_flat_state(state)}


def with_parameters(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """A copy of `state` with the values replaced, by path."""
    flat = [
        (keys, variable.replace(values[path_of(keys)]))
        for keys, variable in nnx.to_flat_state(state)
    ]
    filled: nnx.State = nnx.from_flat_state(flat)
    return filled


def is_of_vocabulary(path: str) -> bool:
    """True if the first axis of a parameter is the vocabulary."""
    return path.startswith(("embedding.table", "head."))


def stored_shape(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The shape of a parameter in checkpoints: no padding of the vocabulary, and one copy of each key/value head."""
    if is_of_vocabulary(path):
        return (config.vocab_size, *shape[1:])
    return (*shape[:-1], shape[-1] // num_copies(path, config))


def stored_shapes(state: nnx.State, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter in checkpoints, as in `stored_shape`; an axis "vocab" marks a table of tokens."""
    shapes = {}
    for keys, variable in nnx.to_flat_state(state):
        path = path_of(keys)
        shape = variable.get_value().shape
        axes = variable.get_metadata("axes", ())
        if "vocab" in axes:
            shape = tuple(
                config.vocab_size if axis == "vocab" else size
                for axis, size in zip(axes, shape, strict=True)
            )
        copies = num_copies(path, config)
        if copies > 1:
            shape = (*shape[:-1], shape[-1] // copies)
        shapes[path] = shape
    return shapes


def num_copies(path: str, config: ModelConfig) -> int:
    """The copies of each key/value head in a parameter; 1 in parameters without these heads."""
    _, mixer, name, *_ = (*path.replace("attention_mamba.", "", 1).split("."), "", "")
    names = ["key", "value"]
    if config.qk_norm == "all":
        names.append("key_norm")
    if mixer in ("attention", "wide_attention") and name in names:
        return config.of_mixer(mixer).kv_copies
    return 1


def head_dim_of(path: str, config: ModelConfig) -> int:
    """The dimensions of the heads in a parameter of attention."""
    return config.of_mixer(path.split(".")[1]).head_dim


def copied_columns(bounds: range, copies: int, head_dim: int) -> np.ndarray:
    """The stored columns that the columns `bounds` of a parameter with `copies` of each head are copies of."""
    column = np.arange(bounds.start, bounds.stop)
    return column // (head_dim * copies) * head_dim + column % head_dim


def first_copies(values: np.ndarray, copies: int, head_dim: int) -> np.ndarray:
    """The stored columns of a parameter with `copies` of each head."""
    heads = values.reshape(*values.shape[:-1], -1, copies, head_dim)
    return heads[..., 0, :].reshape(*values.shape[:-1], -1)


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[range, ...]:
    """The entries of an array of `shape` in the shard `index`, for each axis."""
    return tuple(range(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def first_line(error: Exception) -> str:
    """The message of a library's error, shortened for a list of problems."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
