"""Work lists on the device: the items of all rows, row by row, in arrays of a length fixed at compilation."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class RowItems(NamedTuple):
    """Row r has the items `begin[r] : begin[r] + count[r]`. Entries at and after `total` are padding."""

    row: Int[Array, " M"]  # row of each item; the last row for padding
    within: Int[Array, " M"]  # index of the item within its row
    begin: Int[Array, " R"]  # first item of each row
    total: Int[Array, " 1"]


def lay_out(count: Int[Array, " R"], most: int) -> RowItems:
    """Lay out the items of all rows.

    Args:
        count: number of items of each row.
        most: M, the length of the arrays; at least the sum of `count`.
    """
    end = jnp.cumsum(count, dtype=jnp.int32)
    entry = jnp.arange(most, dtype=jnp.int32)
    row = jnp.minimum((end <= entry[:, None]).sum(axis=1, dtype=jnp.int32), count.shape[0] - 1)
    begin = end - count
    return RowItems(row, entry - begin[row], begin, end[-1:])
