"""Linear attention with a decay: each request has a matrix of state for each head, and no pages."""

from orca_jax.kernels.linear_state.api import IMPLEMENTATIONS, linear_state

__all__ = ["IMPLEMENTATIONS", "linear_state"]
