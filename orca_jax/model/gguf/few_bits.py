"""Tensors of GGUF in 4 or 8 bits, in the packed form of the library in C: the bits of the file in another order."""

from typing import NamedTuple

import numpy as np

from orca_jax.kernels.native import PackedBits

GROUP = 32
"""Numbers of a block of a file, which share a scale."""


class BlockKind(NamedTuple):
    """The blocks of a type: a scale in float16, a minimum if there is one, and the numbers."""

    bits: int
    has_minima: bool


BLOCK_KINDS = {"Q4_0": BlockKind(4, False), "Q4_1": BlockKind(4, True), "Q8_0": BlockKind(8, False)}
"""By their names in GGUF."""

_BYTES_OF_4 = [0, 4, 1, 5], [2, 6, 3, 7]  # inputs in the low and the high bits of the bytes of a word
_BYTES_OF_8 = [0, 2, 1, 3]


def packed_blocks(rows: np.ndarray, kind: BlockKind, width: int) -> PackedBits:
    """The packed form of a matrix; its entries are exactly those of the file.

    Args:
        rows: the bytes of the outputs, uint8 [O, bytes].
        kind: the type of the tensor.
        width: columns of a packed block; divides O.
    """
    blocks = rows.reshape(rows.shape[0], -1, (4 if kind.has_minima else 2) + GROUP * kind.bits // 8)
    begin = 4 if kind.has_minima else 2
    factors, stored = np.ascontiguousarray(blocks[..., :begin]).view(np.float16), blocks[..., begin:]
    if kind.bits == 4:
        numbers = np.concatenate([stored & 15, stored >> 4], axis=-1).reshape(len(rows), -1, 8)
        low, high = _BYTES_OF_4
        words = numbers[..., low] | numbers[..., high] << 4
    else:
        words = (stored ^ 0x80).reshape(len(rows), -1, 4)[..., _BYTES_OF_8]
    minima = _by_columns(-factors[..., 1], width) if kind.has_minima else None  # a file has what is added
    whole = np.ascontiguousarray(words).view(np.uint32)[..., 0]
    return PackedBits(_by_columns(whole, width), _by_columns(factors[..., 0], width), kind.bits, minima)


def _by_columns(rows: np.ndarray, width: int) -> np.ndarray:
    """Rows of outputs [O, J] as blocks of columns [O / width, J, width]."""
    return np.ascontiguousarray(rows.reshape(-1, width, rows.shape[1]).swapaxes(1, 2))
