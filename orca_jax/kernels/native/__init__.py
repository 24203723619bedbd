"""Products, new tokens and attention of increments on CPUs: a small C library, called by XLA."""

from orca_jax.kernels.native.increments import attend_increments, write_and_attend_increments
from orca_jax.kernels.native.library import Library, load_library, loaded_library
from orca_jax.kernels.native.products import (
    Packed,
    can_multiply_table,
    can_pack,
    in_stack,
    inputs_each,
    pack,
    packed_product,
    table_product,
)

__all__ = [
    "Library",
    "Packed",
    "attend_increments",
    "can_multiply_table",
    "can_pack",
    "in_stack",
    "inputs_each",
    "load_library",
    "loaded_library",
    "pack",
    "packed_product",
    "table_product",
    "write_and_attend_increments",
]
