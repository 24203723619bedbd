"""Products of activations with matrices and tables, plain or quantised."""

from orca_jax.kernels.matmul.api import (
    matmul,
    precision_of,
    product_of_heads,
    quantised_matmul,
    quantised_scores,
    table_scores,
)
from orca_jax.kernels.matmul.parts import Quantised, group_size, lanes

__all__ = [
    "Quantised",
    "group_size",
    "lanes",
    "matmul",
    "precision_of",
    "product_of_heads",
    "quantised_matmul",
    "quantised_scores",
    "table_scores",
]
