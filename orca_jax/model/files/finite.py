"""Weights that are NaN or infinite, counted while they are read: a damaged file, or a training that diverged."""

import logging
from collections import Counter
from functools import cache

import jax.numpy as jnp
import numpy as np

PART_BYTES = 2**19
"""Bytes that are compared at once, in the caches of a processor."""
_MAX_NAMED = 10

logger = logging.getLogger(__name__)


def num_not_finite(values: np.ndarray) -> int:
    """Count the values of an array that are NaN or infinite; 0 for integers.

    The bits of a number above those of infinity are NaN: the largest of the bits, once with a sign and once without,
    tell that there are none. This reads the array twice and writes nothing. Give parts that fit into a cache.
    """
    bits = _bits(values.dtype)
    if not values.size or bits is None:
        return 0
    signed, unsigned, positive, negative = bits
    if int(values.view(signed).max()) < positive and int(values.view(unsigned).max()) < negative:
        return 0
    return values.size - int(np.count_nonzero(np.isfinite(values)))


@cache
def _bits(dtype: np.dtype) -> tuple[np.dtype, np.dtype, int, int] | None:
    """Integers of the same size, and the bits of both infinities: as a signed and as an unsigned integer.

    None for types without infinities.
    """
    if not jnp.issubdtype(dtype, np.floating):
        return None
    signed = np.dtype(f"i{dtype.itemsize}")
    unsigned = np.dtype(f"u{dtype.itemsize}")
    both = np.array([np.inf, -np.inf]).astype(dtype)
    return signed, unsigned, int(both.view(signed)[0]), int(both.view(unsigned)[1])


class NotFinite:
    """The number of these values in each tensor."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add_tensor(self, name: str, count: int) -> None:
        """Note the values of a tensor, or of a part of it that is read once more for another device."""
        if count:
            self._counts[name] = max(count, self._counts[name])

    def warn(self, source: str) -> None:
        """Log one warning with the names of the tensors, if there are any."""
        if not self._counts:
            return
        named = [
            f"{name} ({count} values)" for name, count in list(self._counts.items())[:_MAX_NAMED]
        ]
        more = [f"{len(self._counts) - _MAX_NAMED} more"] if len(self._counts) > _MAX_NAMED else []
        logger.warning(
            "%s: NaN or infinity in %s: requests whose logits are not finite will fail; download the files again, or "
            "save the model again",
            *(source, ", ".join([*named, *more])),
        )
