"""The parts shared by the implementations: products, and the order of tokens by expert."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

type Activate = Callable[[Array], Array]
type Implementation = Callable[[Array, Array, Array, Array, Array, Array, Activate], Array]
"""`(x, chosen, weights, gate, up, down, activation) -> out`, as `api.expert_mlp`."""


def precision_of(kernel: jax.Array) -> jax.lax.Precision | None:
    """Full float32 products for float32 weights, even if TF32 is the default."""
    return jax.lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else None


def one_expert(
    x: Float[Array, "M E"],
    gate: Float[Array, "E F"],
    up: Float[Array, "E F"],
    down: Float[Array, "F E"],
    activation: Activate,
) -> Float[Array, "M E"]:
    """The MLP of one expert on M tokens. Products have the type of the weights and float32 sums."""

    def product(x: Array, kernel: Array) -> Array:
        return jnp.matmul(
            x.astype(kernel.dtype), kernel, precision=precision_of(kernel), preferred_element_type=jnp.float32
        )

    return product(activation(product(x, gate)) * product(x, up), down)


class SortedChoices(NamedTuple):
    """The choices of all tokens, A = T * C of them, in the order of experts."""

    token: Int[Array, "A"]  # of each choice in this order
    place: Int[Array, "T C"]  # of each choice of a token in this order
    sizes: Int[Array, "X"]  # choices of each expert

    def mix(self, results: Float[Array, "A E"], weights: Float[Array, "T C"]) -> Float[Array, "T E"]:
        """The weighted sums of the tokens' results. `results` has one row for each choice, or more."""
        return jnp.sum(results[self.place] * weights[..., None], axis=1)


def sort_choices(chosen: Int[Array, "T C"], num_experts: int) -> SortedChoices:
    """Sort the choices by expert, and those of the same expert by token."""
    flat = chosen.ravel().astype(jnp.int32)
    size = flat.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)
    order = jax.lax.sort(flat * size + index) % size  # one array of unique keys sorts faster than a pair of arrays
    place = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    count = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    return SortedChoices(order // chosen.shape[1], place.reshape(chosen.shape), count)
