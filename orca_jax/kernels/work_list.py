"""Work lists on the device: items of rows, one row after the other, in arrays whose length is known when compiling."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


class RowItems(NamedTuple):
    """Row r has the items `begin[r] : begin[r] + count[r]`; places from `total` on are items of nobody."""

    row: Int[Array, " M"]  # whose item; of a place without one, the last row
    within: Int[Array, " M"]  # which of its row's items
    begin: Int[Array, " R"]
    total: Int[Array, " 1"]


def lay_out(count: Int[Array, " R"], most: int) -> RowItems:
    """The items of all rows.

    Args:
        count: items of each row.
        most: M, places for them; at least as many as there are.
    """
    end = jnp.cumsum(count, dtype=jnp.int32)
    place = jnp.arange(most, dtype=jnp.int32)
    row = jnp.minimum((end <= place[:, None]).sum(axis=1, dtype=jnp.int32), count.shape[0] - 1)
    begin = end - count
    return RowItems(row, place - begin[row], begin, end[-1:])
