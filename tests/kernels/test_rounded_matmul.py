"""CUDA cards round the products of many tokens with matrices in bfloat16, and nothing else does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.matmul import matmul, rounded_matmul


def lowered(platform: str, tokens: int, dtype: str) -> str:
    x = jax.ShapeDtypeStruct((tokens, 16), jnp.float32)
    kernel = jax.ShapeDtypeStruct((16, 32), jnp.dtype(dtype))
    traced = jax.jit(rounded_matmul).trace(x, kernel)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("platform", "tokens", "dtype", "is_rounded"),
    [
        ("cuda", 512, "bfloat16", True),
        ("cuda", 64, "bfloat16", False),
        ("cuda", 512, "float32", False),
        ("cuda", 512, "float16", False),
        ("tpu", 512, "bfloat16", False),
        ("cpu", 512, "bfloat16", False),
    ],
)
def test_results_are_rounded(platform: str, tokens: int, dtype: str, is_rounded: bool) -> None:
    text = lowered(platform, tokens, dtype)
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert product.endswith("x32xbf16>") == is_rounded
    assert ("optimization_barrier" in text) == is_rounded


def test_elsewhere_it_is_the_same_product() -> None:
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(300, 16)), jnp.float32)
    kernel = jnp.asarray(random.normal(size=(16, 32)), jnp.bfloat16)
    ours = jax.jit(rounded_matmul)(x, kernel)
    assert ours.dtype == jnp.float32
    np.testing.assert_array_equal(ours, jax.jit(matmul)(x, kernel))
