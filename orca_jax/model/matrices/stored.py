"""Matrices that keep the bits of their files: their shapes, then their values.

A format of files has a `StoredBits` for each of its matrices. It gives the form before a decoder is compiled, and the
numbers when it is loaded: packed for the library in C, or with their scales for products of XLA.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flax import nnx

from orca_jax.kernels.native import Library, PackedBits
from orca_jax.model.experts import Experts
from orca_jax.model.families.base import JoinedPart, Weight
from orca_jax.model.layers import Linear, Table
from orca_jax.model.matrices.bits_shapes import BitsForm
from orca_jax.model.matrices.few_bits import stored_bits
from orca_jax.model.matrices.grouped import GroupedForm, GroupedNumbers, grouped_shapes
from orca_jax.model.parameters import path_of, split_layer
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import ModelConfig


@runtime_checkable
class StoredBits(Protocol):
    """A matrix of few bits in files."""

    @property
    def key(self) -> str:
        """The name of the plain tensor."""
        ...

    @property
    def order(self) -> tuple[int, int]:
        """Sorts matrices by their places in the files."""
        ...

    @property
    def form(self) -> BitsForm | None:
        """The form of its numbers in memory; None if there is none."""
        ...

    @property
    def grouped(self) -> GroupedForm | None:
        """The form of its numbers for products of XLA; None if there is none."""
        ...

    @property
    def input_order(self) -> np.ndarray | None:
        """The input that each row of the packed matrix multiplies, int32 [I]; None if they are in order."""
        ...

    def fills(self, shape: tuple[int, ...], name: str) -> bool:
        """True unless a matrix of this shape has copies of some outputs. A table may have more rows, for padding."""
        ...

    def blocks(self, num_blocks: int, width: int) -> Iterator[tuple[int, PackedBits]]:
        """Yield some packed blocks after the number of the first one. Outputs beyond the stored ones are zeros.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def grouped_numbers(self) -> GroupedNumbers:
        """All numbers in the form `grouped`. Raises OSError."""
        ...


class ForLibrary:
    """The parts of `StoredBits` of a matrix with inputs in order, which XLA has no product for."""

    @property
    def grouped(self) -> None:
        """No form for products of XLA."""
        return None

    def grouped_numbers(self) -> GroupedNumbers:
        """Not there, since there is no form."""
        raise AssertionError("a matrix without a grouped form has no such numbers")

    @property
    def input_order(self) -> None:
        """The inputs are in order."""
        return None


@dataclass(frozen=True)
class StoredMatrices:
    """The matrices of few bits in the files of a model.

    Attributes:
        config: the model.
        table: the rows of all weights, as the files have them.
        find: the matrix of a row, a layer and an expert; None if it is not in few bits.
    """

    config: ModelConfig
    table: tuple[Weight, ...]
    find: Callable[[Weight, int, int | None], StoredBits | None]

    def of(self, path: str, layers: range) -> list[StoredBits]:
        """The matrices of a parameter of a stage; empty if one of them is not in few bits.

        Args:
            path: a parameter, or a stack with all layers of the stage.
            layers: the layers of the stage.
        """
        whole, layer = split_layer(path)
        weight = next((weight for weight in self.table if weight.path == whole), None)
        if weight is None or weight.first_row or weight.transpose == path.endswith(".table"):
            return []
        needed = layers
        if layer is not None or not weight.stacked:
            first = layers.start + (layer or 0)
            needed = range(first, first + 1)
        found: list[StoredBits] = []
        for layer, expert in product(needed, experts_of(weight, self.config)):
            matrix = self.find(weight, layer, expert)
            if matrix is None:
                return []
            found.append(matrix)
        return found


def experts_of(weight: Weight, config: ModelConfig) -> Sequence[int | None]:
    """The numbers of the experts with a matrix in this row; None alone for other rows."""
    if not weight.is_of_experts or config.experts is None:
        return (None,)
    return range(config.experts.count)


def outputs_of(part: JoinedPart) -> np.ndarray:
    """The tensor's column of each column of a parameter."""
    columns: np.ndarray = part.column(np.arange(part.groups * part.sizes[part.index]))
    return columns


def keep_bits(
    stored: StoredMatrices, decoder: Decoder, library: Library | None, num_devices: int
) -> None:
    """Replace shapes of matrices and tables by those of the bits in files, as far as products can read them.

    Args:
        stored: the matrices of the files.
        decoder: the decoder, whose parameters are sharded shapes. A stack is replaced only if all of its layers
            have a form.
        library: the library of the products; None for those of XLA. XLA reads no tables.
        num_devices: the devices that share the processors of this machine.
    """

    def kept(path: str, name: str, held: Any) -> Any:
        """The form of the files' bits; None if there is none."""
        if not held.is_plain:
            return None
        found = stored.of(path, range(decoder.span.start, decoder.span.stop))
        if not found or not all([matrix.fills(held.get_value().shape, name) for matrix in found]):
            return None
        if library is None:
            kinds = {matrix.grouped for matrix in found}
            kind = kinds.pop()
            return None if kinds or kind is None else grouped_shapes(held, kind)
        forms = [matrix.form for matrix in found if matrix.form is not None]
        if len(forms) < len(found):
            return None
        return stored_bits(held, library, num_devices, forms)

    for keys, module in list(nnx.iter_modules(decoder)):
        names = matrix_names(module, has_library=library is not None)
        matrices = {name: getattr(module, name) for name in names}
        forms = {
            name: kept(f"{path_of(keys)}.{name}", name, held) for name, held in matrices.items()
        }
        if None not in forms.values():
            for name, form in forms.items():
                setattr(module, name, form)


def matrix_names(module: nnx.Module, *, has_library: bool) -> Sequence[str]:
    """The matrices of a module with kept bits, all or none.

    The library reads those of experts on one device, and XLA no tables.
    """
    if isinstance(module, Experts) and (module.is_alone or not has_library):
        return list(module.matrices)
    if isinstance(module, Linear):
        return ("kernel",)
    if isinstance(module, Table) and has_library:
        return ("table",)
    return ()
