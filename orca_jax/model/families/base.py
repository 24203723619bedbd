"""The mapping of a checkpoint's tensors to parameters. Plain data, no arrays."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True)
class JoinedPart:
    """The columns of one parameter in a tensor with several parameters, after `Weight.transpose`.

    The columns of the tensor are `groups` equal groups. Each has columns of all the parameters in their order,
    `sizes` in number; those of `index` belong to this one. Those from `pairs[0]` to `pairs[1]` of each group of the
    parameter are rotated: the tensor has pairs side by side, the parameter first ones and then second ones.
    """

    index: int
    sizes: tuple[int, ...]
    groups: int = 1
    pairs: tuple[int, int] = (0, 0)

    @property
    def num_columns(self) -> int:
        """Columns of the whole tensor."""
        return self.groups * sum(self.sizes)

    def column(self, number: Any) -> Any:
        """The tensor's column with the column `number` of the parameter; or an array of them, for an array."""
        group, offset = divmod(number, self.sizes[self.index])
        first, stop = self.pairs
        if stop > first:
            second, pair = divmod(offset - first, (stop - first) // 2)
            offset = offset + ((first <= offset) & (offset < stop)) * (
                first + 2 * pair + second - offset
            )
        return group * sum(self.sizes) + sum(self.sizes[: self.index]) + offset


@dataclass(frozen=True)
class Weight:
    """The mapping of one tensor of a checkpoint to a parameter.

    Attributes:
        key: name without the family's prefix. "{layer}" stands for the layer's number, and "{expert}" for the number of
            an expert; the tensors of all layers and experts are stacked into one parameter. With "[{expert}]" at the
            end, one tensor has the matrices of all experts of a layer.
        path: the path of the parameter in the decoder.
        transpose: True if the tensor is [out, in]; the parameter is [in, out].
        part: the columns of the parameter, if the tensor holds several ones.
        prefixed: False for a tensor outside the family's prefix.
        first_row: the first row of the parameter in the tensor; 0 in stacked ones.
        others: names of the tensor in older files.
        is_row: True for a vector that is a matrix of one row in the tensor.
        is_scalar: True for a parameter of one number, whose tensor has no axes.
        is_conv: True for the taps of a convolution: the tensor is [channels, 1, taps], the parameter [taps, channels].
        instead: the row of files that have none of the tensors of this one.
    """

    key: str
    path: str
    transpose: bool = False
    part: JoinedPart | None = None
    prefixed: bool = True
    first_row: int = 0
    others: tuple[str, ...] = ()
    is_row: bool = False
    is_scalar: bool = False
    is_conv: bool = False
    instead: "Weight | None" = None

    @property
    def stacked(self) -> bool:
        """True if there is one tensor for each layer, or one for each of its experts."""
        return "{layer}" in self.key

    @property
    def is_of_experts(self) -> bool:
        """True if there is one tensor for each expert of each layer."""
        return "{expert}" in self.key


class TensorSum(NamedTuple):
    """A tensor that files have elsewhere, or as a sum. The names have no prefix.

    Attributes:
        base: the tensor, or the first term.
        factors: matrices [rank, in] and [out, rank]. Their product is the second term. Empty: there is none.
    """

    base: str
    factors: tuple[str, ...] = ()


def words(text: str) -> frozenset[str]:
    """The words of a text, which are keys of a config.json."""
    return frozenset(text.split())


def with_change(rows: Iterable[Weight], path: str, **fields: Any) -> tuple[Weight, ...]:
    """The rows, with other values of some fields for the parameter `path`."""
    return tuple(replace(row, **fields) if row.path == path else row for row in rows)
