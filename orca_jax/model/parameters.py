"""Access to the decoder's parameters by path, for the loaders."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from orca_jax.config import ModelConfig


def flat_parameters(state: nnx.State) -> dict[str, Any]:
    """The value of each parameter by its path, such as "blocks.mlp.up.kernel", in the order of paths."""
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def with_parameters(state: nnx.State, values: Mapping[str, Any]) -> nnx.State:
    """A copy of `state` with the values replaced, by path."""
    flat = [(path, variable.replace(values[".".join(map(str, path))])) for path, variable in nnx.to_flat_state(state)]
    filled: nnx.State = nnx.from_flat_state(flat)
    return filled


def stored_shape(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The shape of a parameter without the padding of the vocabulary."""
    return (config.vocab_size, *shape[1:]) if path in ("embedding.table", "head.table") else shape


def first_line(error: Exception) -> str:
    """The message of a library's error, shortened for a list of problems."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
