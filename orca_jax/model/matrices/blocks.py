"""Numbers of files in the packed form of the library in C, by NumPy: the bits of the files in another order."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from orca_jax.kernels.native import PackedBits
from orca_jax.model.files.stripes import STRIPE_BYTES
from orca_jax.model.matrices.bits_shapes import BitsForm


class BitsParts(NamedTuple):
    """The parts of some outputs of a matrix. Numbers count from 0; minima are subtracted.

    Attributes:
        numbers: uint8 [O, I], or with more axes.
        scales: factors of groups, float16, float32 or uint8 [O, G], or with more axes.
        minima: likewise; None for none.
        units: factors of scales, and of minima, that are integers; float16.
    """

    numbers: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None
    units: tuple[np.ndarray, ...] = ()


def packed_stripes(
    read: Callable[[np.ndarray], BitsParts],
    stored: np.ndarray,
    num_blocks: int,
    width: int,
    form: BitsForm,
    inputs: int,
) -> Iterator[tuple[int, PackedBits]]:
    """Yield some packed blocks of a matrix after the number of the first one; each fits into a processor's caches.

    Args:
        read: the parts of some stored outputs, of none too. May raise OSError.
        stored: the stored output of each output of the matrix, without outputs at its end that zeros fill.
        num_blocks: blocks of the matrix.
        width: outputs of a block.
        form: the form of the numbers.
        inputs: numbers of an output.
    """
    each = max(1, STRIPE_BYTES // (inputs * width)) * width
    for start in range(0, num_blocks * width, each):
        count = min(each, num_blocks * width - start)
        numbers, scales, minima, _ = read(stored[start : start + count])
        if minima is not None:
            minima = with_rows(minima, count)
        parts = BitsParts(with_rows(numbers, count), with_rows(scales, count), minima)
        yield start // width, packed_parts(parts, form.bits, width)


def of_ranges(read: Callable[[int, int], BitsParts]) -> Callable[[np.ndarray], BitsParts]:
    """Return a function for some outputs, from one for all outputs of a range that is not empty."""

    def parts(outputs: np.ndarray) -> BitsParts:
        first = int(outputs.min()) if len(outputs) else 0
        stop = int(outputs.max(initial=first)) + 1
        found = read(first, stop)
        places = outputs - first
        return BitsParts(found.numbers[places], found.scales[places])

    return parts


def with_rows(values: np.ndarray, count: int) -> np.ndarray:
    """The values with rows of zeros at the end, if there are fewer than `count`."""
    missing = count - len(values)
    if missing == 0:
        return np.ascontiguousarray(values)
    return np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])


def packed_parts(parts: BitsParts, bits: int, width: int) -> PackedBits:
    """The packed form of some outputs.

    Args:
        parts: the numbers and factors of the outputs.
        bits: the size of a number.
        width: columns of a packed block; divides the outputs.
    """
    outputs = len(parts.numbers)

    def columns(numbers: np.ndarray) -> np.ndarray:
        return _by_columns(numbers.reshape(outputs, -1), width)

    def factors(numbers: np.ndarray) -> np.ndarray:
        return columns(numbers.view(np.int8) if numbers.dtype == np.uint8 else numbers)

    units = [columns(unit) for unit in parts.units]
    return PackedBits(
        columns(_words(parts.numbers.reshape(outputs, -1), bits)),
        factors(parts.scales),
        bits,
        None if parts.minima is None else factors(parts.minima),
        np.concatenate(units, axis=-1) if units else None,
    )


def _words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """The words of each output; see `PackedBits`."""
    rows = len(numbers)
    if bits == 8:
        words = numbers.view(np.uint32)
        middle = (words & np.uint32(0xFF00)) << np.uint32(8) | (
            words & np.uint32(0xFF0000)
        ) >> np.uint32(8)
        return (words & np.uint32(0xFF0000FF)) | middle
    words = _words_of_4(numbers if bits == 4 else numbers & 15)
    if bits == 4:
        return words
    size = 16 if bits == 6 else 32  # inputs whose words are together
    order = [*range(0, size, 2), *range(1, size, 2)]
    rest = (numbers >> 4).reshape(rows, -1, size)[..., order]
    if bits == 5:
        last: np.ndarray = np.packbits(rest, axis=-1, bitorder="little")
    else:
        fours = rest.reshape(*rest.shape[:2], 4, 4)
        last = fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6
    return np.concatenate(
        [words.reshape(*rest.shape[:2], -1), np.ascontiguousarray(last).view(np.uint32)], axis=-1
    )


def _words_of_4(numbers: np.ndarray) -> np.ndarray:
    """The words of 8 numbers: from a byte for each of 0 to 7, bytes of 0 and 2, 4 and 6, 1 and 3, 5 and 7."""
    eights = numbers.view(np.uint64)
    pairs = eights >> np.uint64(12)
    pairs |= eights  # bytes 0, 1, 4 and 5 have a number in either half
    even = pairs & np.uint64(0xFF000000FF)
    odd = pairs & np.uint64(0xFF000000FF00)
    pairs = even >> np.uint64(24)
    pairs |= even
    pairs |= odd << np.uint64(8)
    pairs |= odd >> np.uint64(16)
    return pairs.astype(np.uint32)


def _by_columns(rows: np.ndarray, width: int) -> np.ndarray:
    """Rows of outputs [O, J] as blocks of columns [O / width, J, width]."""
    return np.ascontiguousarray(rows.reshape(-1, width, rows.shape[1]).swapaxes(1, 2))
