"""The unembedding: its values, and the work of its program on a CPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.model.layers import Table
from orca_jax.model.maker import Maker
from orca_jax.values.config import DType

ROWS, WIDTH = 384, 48
# largest difference relative to products in float64
UNIT = {"float32": 1e-6, "bfloat16": 1e-2, "float16": 2e-3}


def table(dtype: DType) -> Table:
    return Table(Maker(jnp.dtype(dtype), nnx.Rngs(1)), ROWS, WIDTH, "vocab")


def hidden(rows: int = 16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).normal(size=(rows, WIDTH)), jnp.float32)


@pytest.mark.parametrize("dtype", UNIT)
def test_scores_are_inner_products(dtype: DType) -> None:
    of = table(dtype)
    wanted = np.asarray(hidden(), np.float64) @ np.asarray(of.table.get_value(), np.float64).T
    scores = of.scores(hidden())
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, wanted, rtol=0, atol=UNIT[dtype] * np.abs(wanted).max())


def has_bfloat16_products() -> bool:
    """True on a CPU with instructions for products of bfloat16."""
    features = Path("/proc/cpuinfo")
    text = features.read_text(encoding="utf-8") if features.exists() else ""
    return jax.default_backend() == "cpu" and ("avx512_bf16" in text or "amx_bf16" in text)


@pytest.mark.skipif(not has_bfloat16_products(), reason="needs a CPU with products of bfloat16")
def test_a_table_of_bfloat16_is_not_converted_on_a_cpu() -> None:
    graph, state = nnx.split(table("bfloat16"))
    program = (
        jax.jit(lambda state, vectors: nnx.merge(graph, state).scores(vectors))
        .lower(state, hidden())
        .compile()
    )
    text = program.as_text() or ""
    assert f"bf16[{ROWS},{WIDTH}]" in text
    assert f"f32[{ROWS},{WIDTH}]" not in text and f"f32[{WIDTH},{ROWS}]" not in text
