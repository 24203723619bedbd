"""Writing of a batch's new K and V into the pages of its requests."""

from orca_jax.kernels.kv_write.api import default_write, write_kv

__all__ = ["default_write", "write_kv"]
