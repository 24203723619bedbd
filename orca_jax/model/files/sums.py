"""Tensors that files have elsewhere, or as sums: those of a layer whose weights are those of another one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orca_jax.model.families.base import TensorSum
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.files.stripes import FileMatrix, TensorRows


@dataclass(frozen=True)
class SumMatrix(FileMatrix):
    """A matrix of a file, plus the product of two matrices of low rank. Sums are float32, and rounded to its type."""

    first: FileMatrix  # [rank, in]
    second: FileMatrix  # [out, rank]

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Read the rows from `start` on of all three matrices. Raises OSError."""
        super().read_into(start, values)
        first = _float32(self.first, 0, self.first.num_rows)
        second = _float32(self.second, start, start + len(values))
        values[...] = (values.astype(np.float32) + second @ first).astype(values.dtype)


class Summed(NamedTuple):
    """The tensors of files after `with_sums`, their matrices, and what does not fit."""

    tensors: dict[str, StoredTensor]
    rows: dict[str, TensorRows]
    problems: list[str]


def with_sums(
    tensors: Mapping[str, StoredTensor],
    rows: Mapping[str, TensorRows],
    sums: Mapping[str, Sequence[TensorSum]],
    prefixes: Iterable[str],
) -> Summed:
    """The tensors with each sum in place of its terms. A sum is missing if none of its places has all terms.

    The first place that has all terms counts; other ones are copies.

    Args:
        tensors: those of all files.
        rows: their matrices.
        sums: the places of each, by the names in the family's table, without a prefix.
        prefixes: those of the family.
    """
    found = dict(tensors)
    matrices = dict(rows)
    problems: list[str] = []
    used: set[str] = set()
    for prefix in prefixes:
        for name, places in sums.items():
            whole = _whole_places(prefix, places, rows)
            if not whole:
                continue
            used.update(*whole)
            keys = whole[0]
            own = prefix + name
            base = tensors[keys[0]].matrix(own)
            factors = [tensors[key].matrix(key) for key in keys[1:]]
            found[own] = tensors[keys[0]]
            matrices[own] = base
            if factors:
                problems += _problems(base, factors)
                matrices[own] = SumMatrix(**vars(base), first=factors[0], second=factors[1])
    for key in used - {prefix + name for prefix in prefixes for name in sums}:
        del found[key]
        del matrices[key]
    return Summed(found, matrices, problems)


def _whole_places(
    prefix: str, places: Iterable[TensorSum], rows: Mapping[str, TensorRows]
) -> list[list[str]]:
    """The names of all terms at each place that has all of them."""
    found: list[list[str]] = []
    for place in places:
        keys = [prefix + key for key in (place.base, *place.factors)]
        if rows.keys() >= {*keys}:
            found.append(keys)
    return found


def _problems(base: FileMatrix, factors: Iterable[FileMatrix]) -> list[str]:
    """The problems of the shapes of two factors, whose product is added to `base`."""
    first, second = factors
    rank = first.num_rows
    wanted = ((first, (rank, base.num_columns)), (second, (base.num_rows, rank)))
    return [
        f"{factor.key}: shape {[factor.num_rows, factor.num_columns]}, the model needs {list(shape)}"
        for factor, shape in wanted
        if (factor.num_rows, factor.num_columns) != shape
    ]


def _float32(matrix: FileMatrix, start: int, stop: int) -> np.ndarray:
    """Some rows of a matrix. Raises OSError."""
    values = np.empty((stop - start, matrix.num_columns), matrix.dtype)
    matrix.read_into(start, values)
    return values.astype(np.float32)
