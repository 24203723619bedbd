"""Packed stripes of matrices in files, with outputs that no file has."""

import numpy as np
import pytest

from orca_jax.model.files import stripes
from orca_jax.model.matrices import blocks
from orca_jax.model.matrices.bits_shapes import BitsForm
from orca_jax.model.matrices.blocks import BitsParts, of_ranges, packed_stripes


def test_stripes_of_padding_alone_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 3 stored rows and 12 in memory, 4 in a stripe: the reader is never asked for an empty range."""
    monkeypatch.setattr(blocks, "STRIPE_BYTES", 32 * 4)
    assert stripes.STRIPE_BYTES > 32 * 4
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> BitsParts:
        asked.append((start, stop))
        rows = np.arange(start, stop)
        numbers = np.repeat(rows[:, None] + 1, 32, axis=1).astype(np.uint8)
        return BitsParts(numbers, np.ones((len(rows), 1), np.float32))

    found = dict(packed_stripes(of_ranges(read), np.arange(3), 3, 4, BitsForm(8), 32))
    assert all([start < stop for start, stop in asked])
    assert found[0].scales.tolist() == [[[1, 1, 1, 0]]]
    assert found[0].words[0, 0].tolist() == [0x01010101, 0x02020202, 0x03030303, 0]
    for place in (1, 2):
        assert not found[place].words.any() and not found[place].scales.any()
