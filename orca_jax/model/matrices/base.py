"""The protocols of matrices and of tables in memory."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp import KernelForm
from orca_jax.kernels.native import Library


@runtime_checkable
class Packable(Protocol):
    """What the library in C may read in another order."""

    @property
    def is_plain(self) -> bool:
        """True if this is one array of numbers in the type of the model."""
        ...

    def packed(self, library: Library, num_devices: int) -> Any:
        """The form that the library reads, with the same protocol, or itself if it has none or is packed already.

        Args:
            library: the library of the products.
            num_devices: the devices that share the processors of this machine.
        """
        ...


@runtime_checkable
class Matrix(Packable, Protocol):
    """A matrix from inputs to outputs, or the matrices of all experts: their arrays, or the shapes of these."""

    @property
    def products_of(self) -> str:
        """The code of its products. Matrices of the same code and the same inputs are multiplied together."""
        ...

    def products(
        self, x: Float[Array, "T I"], matrices: Sequence[Any], sizes: Int[Array, "X"] | None
    ) -> list[Float[Array, "T O"]]:
        """`x` times each of some matrices of this code, with float32 sums; see `layers.multiply`."""
        ...

    def has_packed_form(self, library: Library) -> bool:
        """True if a stack of such matrices has a form that the library reads in place, or has it already."""
        ...


@runtime_checkable
class ExpertMatrices(Matrix, Protocol):
    """The matrices of all experts of a layer."""

    def expert_form(self, count: int) -> KernelForm:
        """The arithmetic of the matrices of `count` experts."""
        ...

    @property
    def operand(self) -> Any:
        """What this arithmetic takes: arrays, or this object."""
        ...


@runtime_checkable
class TableMatrix(Packable, Protocol):
    """A table [V, E] in memory, or the shapes of its arrays."""

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""
        ...

    @property
    def can_skip(self) -> bool:
        """True if `scores` can leave out the vectors after some."""
        ...

    def rows(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The rows `index` in float32; one out of range gets the nearest row."""
        ...

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector, or of the first `count` if it can skip others, with every row."""
        ...
