"""Products, new tokens and attention on CPUs: a small C library, called by XLA."""

from orca_jax.kernels.native.attention import attend_in_c
from orca_jax.kernels.native.few_bits import (
    INPUTS,
    PackedBits,
    bits_in_stack,
    bits_of_experts,
    can_pack_bits,
    few_bits_product,
    few_bits_products,
    pack_bits,
    part_inputs,
    unpack_columns,
)
from orca_jax.kernels.native.integers import FewBits
from orca_jax.kernels.native.library import Library, load_library, require_library
from orca_jax.kernels.native.products import (
    LayerRows,
    Packed,
    can_pack,
    has_products,
    in_stack,
    inputs_each,
    of_experts,
    pack,
    pack_by_numpy,
    packed_columns,
    packed_product,
    packed_products,
)

__all__ = [
    "INPUTS",
    "FewBits",
    "LayerRows",
    "Library",
    "Packed",
    "PackedBits",
    "attend_in_c",
    "bits_in_stack",
    "bits_of_experts",
    "can_pack",
    "can_pack_bits",
    "few_bits_product",
    "few_bits_products",
    "has_products",
    "in_stack",
    "inputs_each",
    "load_library",
    "of_experts",
    "pack",
    "pack_bits",
    "pack_by_numpy",
    "packed_columns",
    "packed_product",
    "packed_products",
    "part_inputs",
    "require_library",
    "unpack_columns",
]
