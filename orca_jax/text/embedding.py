"""Embeddings: hidden vectors as an engine returns them, and their form in answers."""

import base64
import math
import sys
from array import array


def embedding_of(pooled: bytes, *, normalize: bool, dimensions: int | None = None) -> array[float]:
    """The first `dimensions` numbers of a vector of float32, scaled to a length of one if `normalize` is set.

    Lengths are computed in float64. A vector of zeros stays as it is.
    """
    vector = array("f", pooled)[:dimensions]
    length = math.sqrt(math.sumprod(vector, vector)) if normalize else 1.0
    if length not in (0.0, 1.0):
        return array("f", [value / length for value in vector])
    return vector


def in_base64(vector: array[float]) -> str:
    """The numbers as little-endian float32 in base64, as in OpenAI's `encoding_format`."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
