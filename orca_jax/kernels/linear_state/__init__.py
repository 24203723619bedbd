"""Linear attention with a decay: each request has a matrix of state for each head, and no pages."""

from orca_jax.kernels.linear_state.api import IMPLEMENTATIONS, linear_state
from orca_jax.kernels.linear_state.parts import LinearTokens

__all__ = ["IMPLEMENTATIONS", "LinearTokens", "linear_state"]
