"""Products, new tokens and attention of increments on CPUs: a small C library, called by XLA."""

from orca_jax.kernels.native.few_bits import (
    FewBits,
    PackedBits,
    can_pack_bits,
    few_bits_product,
    pack_bits,
    unpack_columns,
)
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
    "FewBits",
    "Library",
    "Packed",
    "PackedBits",
    "attend_increments",
    "can_multiply_table",
    "can_pack",
    "can_pack_bits",
    "few_bits_product",
    "in_stack",
    "inputs_each",
    "load_library",
    "loaded_library",
    "pack",
    "pack_bits",
    "packed_product",
    "table_product",
    "unpack_columns",
    "write_and_attend_increments",
]
