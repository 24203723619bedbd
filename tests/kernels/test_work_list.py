"""Work lists of rows, computed by hand."""

import jax.numpy as jnp
import pytest

from orca_jax.kernels.work_list import lay_out


@pytest.mark.parametrize(
    ("count", "rows", "within", "begin"),
    [
        ([2, 0, 3], [0, 0, 2, 2, 2], [0, 1, 0, 1, 2], [0, 2, 2]),
        ([0, 1], [1], [0], [0, 0]),
        ([0, 0], [], [], [0, 0]),
    ],
    ids=["an empty row between", "an empty row first", "nothing"],
)
def test_by_hand(count: list[int], rows: list[int], within: list[int], begin: list[int]) -> None:
    items = lay_out(jnp.asarray(count), 5)
    total = len(rows)
    assert items.total.tolist() == [total]
    assert items.begin.tolist() == begin
    assert items.row[:total].tolist() == rows and items.within[:total].tolist() == within
    assert items.row[total:].tolist() == [len(count) - 1] * (5 - total), (
        "padding must name an existing row"
    )
