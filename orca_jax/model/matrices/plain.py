"""Plain matrices and tables: one array of numbers in the type of the model."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp import KernelForm
from orca_jax.kernels.matmul import matmul, table_scores
from orca_jax.kernels.native import Library
from orca_jax.model.matrices.packed import has_packed_form, packed_matrix, packed_table


class PlainMatrix(nnx.Param[Array]):
    """A matrix [I, O], or the matrices of all experts [X, I, O], with logical axes."""

    is_plain = True
    products_of = "plain"

    def products(
        self,
        x: Float[Array, "T I"],
        matrices: "Sequence[PlainMatrix]",
        sizes: Int[Array, "X"] | None = None,
    ) -> list[Float[Array, "T O"]]:
        """`x` times each of some matrices, with float32 sums."""
        assert sizes is None, "plain matrices of experts have the arithmetic of expert_form"
        return [matmul(x, matrix[...]) for matrix in matrices]

    def packed(self, library: Library, num_devices: int) -> nnx.Param[Any]:
        """Return the form that the library reads; see `packed_matrix`."""
        return packed_matrix(self, library, num_devices)

    def has_packed_form(self, library: Library) -> bool:
        """True if `packed` returns another form."""
        return has_packed_form(self, library)

    def expert_form(self, count: int) -> KernelForm:
        """The arithmetic of plain arrays."""
        return KernelForm()

    @property
    def operand(self) -> Array:
        """The array of all matrices."""
        array: Array = self[...]
        return array


class PlainTable(nnx.Param[Array]):
    """A table [V, E], with logical axes."""

    is_plain = True
    can_skip = False

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""
        return int(self.get_value().shape[0])

    def rows(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The rows `index` in float32; one out of range gets the nearest row."""
        return self[...].at[index].get(mode="clip").astype(jnp.float32)

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector with every row."""
        assert count is None, "only the library skips vectors"
        return table_scores(hidden, self[...])

    def packed(self, library: Library, num_devices: int) -> nnx.Param[Any]:
        """Return the form that the library reads; see `packed_table`."""
        return packed_table(self, library, num_devices)
