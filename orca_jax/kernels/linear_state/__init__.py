"""Linear attention with a decay: each request has a matrix of state for each head, and no pages."""

from orca_jax.kernels.linear_state.api import BACKENDS, linear_state
from orca_jax.kernels.linear_state.parts import LinearTokens

__all__ = ["BACKENDS", "LinearTokens", "linear_state"]
