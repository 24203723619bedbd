"""The decoder's parameters by name, as the loaders see them."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from orca_jax.config import ModelConfig


def flat_parameters(state: nnx.State) -> dict[str, Any]:
    """What each parameter holds, by its path "blocks.mlp.up.kernel", in the order of the paths."""
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def with_parameters(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """`state` with other values, by path."""
    flat = [(path, variable.replace(values[".".join(map(str, path))])) for path, variable in nnx.to_flat_state(state)]
    filled: nnx.State = nnx.from_flat_state(flat)
    return filled


def stored_shape(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The shape of a parameter without the padding of the vocabulary."""
    return (config.vocab_size, *shape[1:]) if path in ("embedding.table", "head.table") else shape


def first_line(error: Exception) -> str:
    """What an error of a library says, short enough for a list."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
