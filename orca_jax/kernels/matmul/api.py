"""Products with matrices and scores of tables, plain or quantised: the operations, and the table of their backends.

    blocks  for CPUs, some rows at a time (`blocks.py`)
    whole   all at once (`whole.py`)

A plain matrix is multiplied by XLA on all platforms.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from orca_jax.kernels.backend import Backend, run_backend
from orca_jax.kernels.matmul.parts import MatrixKind, Quantised

BACKENDS = (
    Backend("blocks", "orca_jax.kernels.matmul.blocks", "cpu"),
    Backend("whole", "orca_jax.kernels.matmul.whole"),
)
"""All run on every platform. A module has `multiply`, `scores` of quantised values, and `plain_scores`."""

_LEAST_ROUNDED = 256  # tokens


def matmul(x: Float[Array, "*T I"], kernel: Float[Array, "I O"]) -> Float[Array, "*T O"]:
    """`x @ kernel` in the type of the kernel, with float32 sums; see `precision_of`."""
    return _matmul(x.astype(kernel.dtype), kernel, jnp.dtype(jnp.float32))


def _matmul(
    x: Float[Array, "*T I"], kernel: Float[Array, "I O"], result: jnp.dtype
) -> Float[Array, "*T O"]:
    return jnp.matmul(x, kernel, precision=precision_of(kernel), preferred_element_type=result)


def rounded_matmul(x: Float[Array, "*T I"], kernel: Float[Array, "I O"]) -> Float[Array, "*T O"]:
    """`matmul`, but a CUDA card rounds the results of many tokens to bfloat16 after the sums, if the kernel has that.

    That halves their bytes. Products of few tokens are sums of parts: rounding them would take a launch more.
    """
    if kernel.dtype != jnp.bfloat16 or x.shape[0] < _LEAST_ROUNDED:
        return matmul(x, kernel)

    def rounded(x: Float[Array, "*T I"], kernel: Float[Array, "I O"]) -> Float[Array, "*T O"]:
        # without the barrier XLA would leave out the conversions
        found = lax.optimization_barrier(_matmul(x, kernel, kernel.dtype))
        return found.astype(jnp.float32)

    result: Array = lax.platform_dependent(
        x.astype(kernel.dtype), kernel, cuda=rounded, default=matmul
    )
    return result


def product_of_heads(
    axes: str, x: Float[Array, "T H I"], kernel: Float[Array, "*any"]
) -> Float[Array, "T H O"]:
    """The product of each head with its own matrix, as in `matmul`; `axes` are those of `jnp.einsum`."""
    return dot(axes, x.astype(kernel.dtype), kernel)


def quantised_matmul(
    x: Float[Array, "T I"], weight: Quantised, kind: MatrixKind, dtype: jnp.dtype, splits: int = 1
) -> Float[Array, "T O"]:
    """`x` times a quantised matrix: operands in `dtype`, float32 sums, and the scales after the sums.

    Args:
        x: activations.
        weight: one matrix.
        kind: the kind of the matrix.
        dtype: type of the products' operands.
        splits: devices over which the inputs are split. Each adds up its own ones, before one sum over all.
    """
    inputs = x.astype(dtype)
    product: Array = run_backend(
        "matmul", BACKENDS, lambda module: module.multiply(inputs, weight, kind, splits)
    )
    return product


def table_scores(hidden: Float[Array, "B E"], table: Float[Array, "V E"]) -> Float[Array, "B V"]:
    """Inner product of every hidden vector with every row of a table."""
    if table.dtype == jnp.float32:
        return matmul(hidden, table.T)
    scores: Array = run_backend(
        "table_scores", BACKENDS, lambda module: module.plain_scores(hidden, table)
    )
    return scores


def quantised_scores(
    hidden: Float[Array, "B E"], table: Quantised, dtype: jnp.dtype, splits: int
) -> Float[Array, "B V"]:
    """Inner product of every hidden vector with every row of a table in int8 with a scale for each row.

    Args:
        hidden: the vectors.
        table: values [V, E] and scales [V].
        dtype: type of the products' operands.
        splits: devices over which the rows are split.
    """
    vectors = hidden.astype(dtype)
    products: jax.Array = run_backend(
        "quantised_scores", BACKENDS, lambda module: module.scores(vectors, table.values, splits)
    )
    return products * table.scale


def precision_of(kernel: jax.Array) -> lax.Precision | None:
    """Full float32 products for float32 weights, even if TF32 is the default."""
    return lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else None


def dot(equation: str, left: Array, right: Array) -> Array:
    """A product with float32 sums, by `einsum`."""
    return jnp.einsum(
        equation, left, right, precision=precision_of(right), preferred_element_type=jnp.float32
    )
