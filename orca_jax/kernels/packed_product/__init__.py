"""Products with packed matrices on CPUs: a small C library, called by XLA."""

from orca_jax.kernels.packed_product.api import (
    can_multiply_table,
    can_pack,
    inputs_each,
    pack,
    packed_product,
    table_product,
)
from orca_jax.kernels.packed_product.library import Library, load_library

__all__ = [
    "Library",
    "can_multiply_table",
    "can_pack",
    "inputs_each",
    "load_library",
    "pack",
    "packed_product",
    "table_product",
]
