"""The parts shared by the implementations: products, and the order of tokens by expert."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.matmul import MatrixKind, matmul

type Activate = Callable[..., Array]
"""`(gate, up) -> hidden`: the vector that is projected back. The gate is None in MLPs without one."""


class Routed(NamedTuple):
    """The different experts of each token, of X, and their weights."""

    chosen: Int[Array, "T C"]
    weights: Float[Array, "T C"]


class ExpertBiases(NamedTuple):
    """The biases of the projections of X experts, [X, F], [X, F] and [X, E]."""

    gate: Any
    up: Any
    down: Any


class ExpertKernels(NamedTuple):
    """The matrices of X experts, or of a single one: arrays, or other trees of arrays with the same first axis.

    Attributes:
        gate: the projections to the gate, [X, E, F]; None in MLPs without one.
        up: the projections to the vectors multiplied by the activated gate, or activated themselves, [X, E, F].
        down: the projections back, [X, F, E].
        biases: those of these projections; None if they have none.
    """

    gate: Any
    up: Any
    down: Any
    biases: ExpertBiases | None = None

    @property
    def num_experts(self) -> int:
        """The length of the first axis."""
        size: int = jax.tree.leaves(self)[0].shape[0]
        return size

    def of(self, expert: Array) -> "ExpertKernels":
        """The matrices of one expert, copied out of the stacks."""
        own: ExpertKernels = jax.tree.map(
            lambda stack: jax.lax.dynamic_index_in_dim(stack, expert, keepdims=False), self
        )
        return own


class KernelForm(NamedTuple):
    """The arithmetic of kernels in one form of storage.

    Attributes:
        multiply: `(x, kernel) -> product`: rows times the kernel of one expert, with float32 sums.
        expand: `kernels -> arrays`: the kernels of all experts as plain arrays.
        grouped: `(x, stacks, sizes) -> products`: rows in the order of experts times the kernels of these, for all of
            `stacks`; None for products of expanded kernels. With it, stacks may be any values.
        kind: the kind of stored kernels, which are `kernels.matmul.Quantised`; None for plain arrays.
        dtype: the type of their factors; None for that of the arrays.
        num_experts: X; None if the stacks have it.
        num_rows: the first tokens that count; the results of others are undefined. None for all.
    """

    multiply: Callable[[Array, Any], Array] = matmul
    expand: Callable[[Any], Array] = lambda kernels: kernels
    grouped: Callable[[Array, list[Any], Array], list[Array]] | None = None
    kind: MatrixKind | None = None
    dtype: Any = None
    num_experts: int | None = None
    num_rows: Array | None = None


PLAIN = KernelForm()


def one_expert(
    x: Float[Array, "M E"], kernels: ExpertKernels, activation: Activate, form: KernelForm = PLAIN
) -> Float[Array, "M E"]:
    """The MLP of one expert on M tokens. Products have the type of the weights and float32 sums."""
    gate = None if kernels.gate is None else form.multiply(x, kernels.gate)
    up = form.multiply(x, kernels.up)
    if kernels.biases is None or gate is None:
        return form.multiply(activation(gate, up), kernels.down)
    biases = kernels.biases
    return form.multiply(activation(gate + biases.gate, up + biases.up), kernels.down) + biases.down


class SortedChoices(NamedTuple):
    """The choices of all tokens, A = T * C of them, in the order of experts."""

    token: Int[Array, "A"]  # of each choice in this order
    place: Int[Array, "T C"]  # of each choice of a token in this order
    sizes: Int[Array, "X"]  # choices of each expert

    def mix(
        self, results: Float[Array, "A E"], weights: Float[Array, "T C"]
    ) -> Float[Array, "T E"]:
        """The weighted sums of the tokens' results. `results` has one row for each choice, or more."""
        return jnp.sum(results[self.place] * weights[..., None], axis=1)


def sort_choices(
    chosen: Int[Array, "T C"], num_experts: int, num_rows: Array | None = None
) -> SortedChoices:
    """Sort the choices by expert, and those of the same expert by token; with `num_rows`, those of the first tokens."""
    if num_rows is not None:
        chosen = jnp.where(jnp.arange(len(chosen))[:, None] < num_rows, chosen, num_experts)
    flat = chosen.ravel().astype(jnp.int32)
    size = flat.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)
    # one array of unique keys sorts faster than a pair of arrays
    order = jax.lax.sort(flat * size + index) % size
    place = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    count = jnp.sum(
        flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32
    )
    return SortedChoices(order // chosen.shape[1], place.reshape(chosen.shape), count)
