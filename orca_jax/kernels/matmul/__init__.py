"""Products of activations with matrices and tables, plain or quantised."""

from orca_jax.kernels.matmul.api import (
    matmul,
    precision_of,
    product_of_heads,
    quantised_matmul,
    quantised_scores,
    rounded_matmul,
    table_scores,
)
from orca_jax.kernels.matmul.parts import (
    PER_BYTE,
    MatrixKind,
    Quantised,
    group_size,
    lanes,
    numbers_of,
)

__all__ = [
    "PER_BYTE",
    "MatrixKind",
    "Quantised",
    "group_size",
    "lanes",
    "matmul",
    "numbers_of",
    "precision_of",
    "product_of_heads",
    "quantised_matmul",
    "quantised_scores",
    "rounded_matmul",
    "table_scores",
]
