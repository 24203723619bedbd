"""Many small arrays as one vector of 32-bit words: one transfer to the device instead of fifteen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32
from numpy.typing import NDArray


@dataclass(frozen=True)
class VectorLayout:
    """Where each array lies in a vector.

    Args:
        shapes: of each array by name, in order.
        floats: names of the arrays that hold float32; the others hold int32.
    """

    shapes: Mapping[str, tuple[int, ...]]
    floats: frozenset[str] = field(default=frozenset())

    @cached_property
    def size(self) -> int:
        """Length of the vector."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def views(self, vector: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        """The arrays of a host vector, to be written in place; floats are views too."""
        out: dict[str, NDArray[Any]] = {}
        start = 0
        for name, shape in self.shapes.items():
            part = vector[start : start + math.prod(shape)].reshape(shape)
            out[name] = part.view(np.float32) if name in self.floats else part
            start += part.size
        return out

    def unpack(self, vector: Int32[Array, " N"]) -> dict[str, Array]:
        """The arrays of a device vector; traced."""
        out: dict[str, Array] = {}
        start = 0
        for name, shape in self.shapes.items():
            part = lax.slice_in_dim(vector, start, start + math.prod(shape)).reshape(shape)
            start += part.size
            out[name] = lax.bitcast_convert_type(part, jnp.float32) if name in self.floats else part
        return out
