"""Attention of a merged batch, split by request inside one call (paper section 3.2, "selective batching")."""

from orca_jax.kernels.ragged_attention.api import default_implementation, implementations, ragged_attention

__all__ = ["default_implementation", "implementations", "ragged_attention"]
