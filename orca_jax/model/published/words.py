"""The orders of integers in the tensors of files.

    AwqMatrix         words of 8 outputs in an order of their own (AWQ, `version: gemm`)
    GptqMatrix        words of some inputs (GPTQ)
    CompressedMatrix  words of some inputs (compressed-tensors, `pack-quantized`)
    ByteMatrix        bytes (compressed-tensors, `int-quantized`)

The rows of the first two are inputs, and those of the others outputs.
"""

from collections.abc import Callable

import numpy as np

from orca_jax.model.published.integers import IntegerMatrix, MatrixColumns

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of 8 outputs in a word."""


class GptqMatrix(IntegerMatrix):
    """Words of some inputs of an output, int32 [I * bits / 32, O]; zero points are in words of outputs."""

    def rows_from(self, start: int, stop: int) -> np.ndarray:
        each = WORD_BITS // self.bits
        first = start // each
        words = self.numbers.rows(first, -(-stop // each))
        numbers = unpacked(words, self.bits).swapaxes(1, 2).reshape(-1, words.shape[1])
        return numbers[start - first * each : stop - first * each]

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        assert self.zeros is not None, "checked by the caller"
        words = self.zeros.rows(start, stop)
        zeros = unpacked(words, self.bits).reshape(len(words), -1)
        return zeros.astype(np.float32) + np.float32(self.zero_offset)


class AwqMatrix(IntegerMatrix):
    """Words of eight outputs of an input, int32 [I, O / 8]; zero points are in such words too."""

    def rows_from(self, start: int, stop: int) -> np.ndarray:
        return _awq_numbers(self.numbers.rows(start, stop))

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        assert self.zeros is not None, "checked by the caller"
        return _awq_numbers(self.zeros.rows(start, stop)).astype(np.float32)


class CompressedMatrix(IntegerMatrix):
    """Words of some inputs, int32 [O, I * bits / 32]; scales are [O, G], and zero points in words of outputs [., G]."""

    @property
    def is_turned(self) -> bool:
        return False

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    def reader(self) -> Callable[[np.ndarray], MatrixColumns]:
        def columns(outputs: np.ndarray) -> MatrixColumns:
            first = int(outputs.min(initial=self.shape[0]))
            last = int(outputs.max(initial=first - 1)) + 1
            own = outputs - first
            zeros = None
            if self.zeros is not None:
                zeros = self.zero_points(first, last)[own]
            scales = self.scales.rows(first, last).astype(np.float32)
            return MatrixColumns(self.rows_from(first, last)[own], scales[own], zeros)

        return columns

    def rows_from(self, start: int, stop: int) -> np.ndarray:
        words = self.numbers.rows(start, stop)
        return unpacked(words, self.bits).reshape(len(words), -1)[:, : self.shape[1]]

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        assert self.zeros is not None, "checked by the caller"
        each = WORD_BITS // self.bits
        first = start // each
        words = self.zeros.rows(first, -(-stop // each))
        zeros = unpacked(words, self.bits).swapaxes(1, 2).reshape(-1, words.shape[1])
        return zeros[start - first * each : stop - first * each].astype(np.float32)

    def factors_of(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | float]:
        scales = self.scales.rows(start, stop).astype(np.float32)[:, self.group_of_input]
        if self.zeros is None:
            return scales, self.middle
        return scales, self.zero_points(start, stop)[:, self.group_of_input]


class ByteMatrix(CompressedMatrix):
    """Signed integers of 8 bits, int8 [O, I] (compressed-tensors, `int-quantized`)."""

    def rows_from(self, start: int, stop: int) -> np.ndarray:
        return self.numbers.rows(start, stop).view(np.uint8) ^ np.uint8(128)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of words, the lowest bits first.

    Args:
        words: int32 [rows, columns].
        bits: the size of a number, 4 or 8.

    Returns:
        uint8 [rows, columns, numbers of a word].
    """
    stored = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return stored
    numbers = np.empty((*words.shape, 4, 2), np.uint8)
    numbers[..., 0] = stored & 15
    numbers[..., 1] = stored >> 4
    return numbers.reshape(*words.shape, 8)


def _awq_numbers(words: np.ndarray) -> np.ndarray:
    """The numbers of words [rows, O / 8], in the order of outputs."""
    return unpacked(words, 4)[..., AWQ_ORDER].reshape(len(words), -1)
