"""Writing the new keys and values of a batch to the pages of its requests."""

from orca_jax.kernels.kv_write.api import default_write, write_kv

__all__ = ["default_write", "write_kv"]
