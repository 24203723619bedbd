"""Writing the new keys and values of a batch to the pages of its requests."""

from orca_jax.kernels.kv_write.api import write_kv

__all__ = ["write_kv"]
