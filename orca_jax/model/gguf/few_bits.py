"""Tensors of GGUF in 4 to 8 bits, in the packed form of the library in C: the bits of the file in another order."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from orca_jax.kernels.native import PackedBits
from orca_jax.model.matrices.bits_shapes import BitsForm
from orca_jax.model.matrices.blocks import BitsParts, packed_parts

_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)


def _halves(blocks: np.ndarray, begin: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., begin : begin + 2].view(np.float16))


def _sixteens(stored: np.ndarray) -> np.ndarray:
    """A copy of bytes [..., 16 n] as uint64 [..., n, 2]. NumPy moves 16 bytes at once as a complex number."""
    return (
        np.ascontiguousarray(stored.view(np.complex128))
        .view(np.uint64)
        .reshape(*stored.shape[:-1], -1, 2)
    )


def _nibbles(stored: np.ndarray, size: int) -> np.ndarray:
    """The numbers of bytes: the low halves of each `size` bytes come before their high halves."""
    eights = _sixteens(stored)
    numbers = np.empty((*stored.shape[:2], stored.shape[2] // size, 2, size // 16), np.complex128)
    numbers[..., 0, :] = (eights & _NIBBLES).view(np.complex128).reshape(numbers[..., 0, :].shape)
    eights >>= np.uint64(4)
    eights &= _NIBBLES
    numbers[..., 1, :] = eights.view(np.complex128).reshape(numbers[..., 1, :].shape)
    return numbers.view(np.uint8).reshape(*stored.shape[:2], -1)


def _fifth_bits(stored: np.ndarray) -> np.ndarray:
    return np.unpackbits(stored, axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> BitsParts:
    return BitsParts(_nibbles(blocks[..., 2:], 16), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> BitsParts:
    # a file has what is added
    return BitsParts(_nibbles(blocks[..., 4:], 16), _halves(blocks, 0), -_halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> BitsParts:
    return BitsParts(
        _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6]), _halves(blocks, 0)
    )


def _q5_1(blocks: np.ndarray) -> BitsParts:
    numbers = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return BitsParts(numbers, _halves(blocks, 0), -_halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> BitsParts:
    numbers = _sixteens(blocks[..., 2:]) ^ np.uint64(0x8080808080808080)
    return BitsParts(numbers.view(np.uint8).reshape(*blocks.shape[:2], -1), _halves(blocks, 0))


def _q4_k(blocks: np.ndarray) -> BitsParts:
    first, second, mixed = (blocks[..., begin : begin + 4] for begin in (4, 8, 12))
    scales = np.concatenate([first & 63, (mixed & 15) | (first >> 2 & 48)], axis=-1)
    minima = np.concatenate([second & 63, (mixed >> 4) | (second >> 2 & 48)], axis=-1)
    units = _halves(blocks, 0), _halves(blocks, 2)
    return BitsParts(_nibbles(blocks[..., 16:144], 32), scales, minima, units)


def _q5_k(blocks: np.ndarray) -> BitsParts:
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    parts = _q4_k(np.concatenate([blocks[..., :16], blocks[..., 48:]], axis=-1))
    return parts._replace(numbers=parts.numbers | high.reshape(parts.numbers.shape) << 4)


def _q6_k(blocks: np.ndarray) -> BitsParts:
    groups = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = groups >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = _nibbles(blocks[..., :128], 64)
    return BitsParts(
        numbers | high.reshape(numbers.shape) << 4,
        blocks[..., 192:208],
        units=(_halves(blocks, 208),),
    )


class BlockKind(NamedTuple):
    """A type: the bytes of its blocks, their form, and a function for their parts."""

    num_bytes: int
    form: BitsForm
    parts: Callable[[np.ndarray], BitsParts]


BLOCK_KINDS = {
    "Q4_0": BlockKind(18, BitsForm(4), _q4_0),
    "Q4_1": BlockKind(20, BitsForm(4, has_minima=True), _q4_1),
    "Q5_0": BlockKind(22, BitsForm(5), _q5_0),
    "Q5_1": BlockKind(24, BitsForm(5, has_minima=True), _q5_1),
    "Q8_0": BlockKind(34, BitsForm(8), _q8_0),
    "Q4_K": BlockKind(144, BitsForm(4, has_minima=True, unit=8), _q4_k),
    "Q5_K": BlockKind(176, BitsForm(5, has_minima=True, unit=8), _q5_k),
    "Q6_K": BlockKind(210, BitsForm(6, group=16, unit=16), _q6_k),
}
"""By their names in GGUF."""


def packed_blocks(rows: np.ndarray, kind: BlockKind, width: int) -> PackedBits:
    """The packed form of a matrix; its entries are exactly those of the file.

    Args:
        rows: the bytes of the outputs, uint8 [O, bytes].
        kind: the type of the tensor.
        width: columns of a packed block; divides O.
    """
    parts = kind.parts(rows.reshape(len(rows), -1, kind.num_bytes))
    return packed_parts(parts, kind.form.bits, width)
