"""The kernel for CUDA cards, interpreted: tiles by hand, and stored matrices against the oracle."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.kernels.expert_mlp import ExpertKernels, KernelForm, expert_mlp
from orca_jax.kernels.expert_mlp.triton import LEAST_ROWS, lay_out, tile_rows
from orca_jax.kernels.matmul import MatrixKind, Quantised, quantised_matmul
from orca_jax.model.matrices.quantise import expand, quantise
from tests.covering import slow

pytestmark = pytest.mark.usefixtures("quick_compiles")
EXPERTS, TOKENS, CHOICES = 5, 37, 2
EVEN, UNEVEN = (96, 160), (52, 84)  # numbers of an input and of a hidden vector


def test_tiles_of_the_example() -> None:
    tiles = lay_out(jnp.array([5, 0, 19]), 24, 16)
    found = list(zip(*(np.asarray(part).tolist() for part in tiles), strict=True))
    assert found[:3] == [(0, 0, 5), (2, 5, 16), (2, 21, 3)]
    assert [length for _, _, length in found[3:]] == [0]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 70), min_size=6, max_size=6))
def test_tiles_cover_each_row_once(sizes: list[int]) -> None:
    rows = 16
    tiles = lay_out(jnp.array(sizes), 6 * 70, rows)
    expert_of_row = np.repeat(np.arange(len(sizes)), sizes)
    covered: list[int] = []
    for expert, first, length in zip(*map(np.asarray, tiles), strict=True):
        own = range(first, first + length)
        assert length <= rows
        assert all(expert_of_row[row] == expert for row in own)
        covered += own
    assert covered == [*range(sum(sizes))]


@pytest.mark.parametrize("mean", [27, 64, 128, 256, 1000])
def test_tiles_have_few_rows_more_than_there_are(mean: int) -> None:
    """The last tile of an expert is half full on average."""
    rows = tile_rows(mean * EXPERTS, EXPERTS)
    assert (mean + rows / 2) / mean <= 1.3
    assert tile_rows(EXPERTS, EXPERTS) == LEAST_ROWS


def stored(draw: np.random.Generator, kind: str, inputs: int, outputs: int) -> Quantised:
    """The matrices of all experts."""
    if kind in ("int8", "fp8", "int4"):
        plain = jnp.asarray(draw.normal(size=(EXPERTS, inputs, outputs)), jnp.float32)
        return quantise(plain, kind)  # type: ignore[arg-type]
    values = draw.integers(-128, 128, (EXPERTS, inputs // 2, outputs))
    groups = EXPERTS, inputs // 4, outputs
    scale = jnp.asarray(draw.random(groups), jnp.bfloat16)
    zero = None
    if kind == "int4 with zero points":
        zero = jnp.asarray(draw.integers(-8, 8, groups), jnp.int16)
    return Quantised(jnp.asarray(values, jnp.int8), scale, zero)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("int8", UNEVEN),
        ("fp8", EVEN),
        ("int4", UNEVEN),
        ("int4 with zero points", UNEVEN),
        ("fp4", EVEN),
        slow("fp8", UNEVEN),
        slow("fp4", UNEVEN),
    ],
)
def test_stored_matrices(kind: str, sizes: tuple[int, int]) -> None:
    draw = np.random.default_rng(0)
    embed, width = sizes
    of_kind: Any = kind.split()[0]
    x = jnp.asarray(draw.normal(size=(TOKENS, embed)), jnp.float32)
    chosen = np.stack([draw.permutation(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
    weights = jnp.asarray(draw.random((TOKENS, CHOICES)), jnp.float32)
    shapes = ((embed, width), (embed, width), (width, embed))
    kernels = ExpertKernels(*(stored(draw, kind, *shape) for shape in shapes))
    ours, oracle = (
        jax.jit(
            partial(
                expert_mlp,
                activation=lambda gate, up: jax.nn.silu(gate) * up,
                form=form_of(of_kind),
                implementation=name,
            )
        )(x, jnp.asarray(chosen, jnp.int32), weights, kernels)
        for name in ("triton", "dense")
    )
    np.testing.assert_allclose(ours, oracle, rtol=0, atol=4e-6 * float(jnp.abs(oracle).max()))


def form_of(kind: MatrixKind) -> KernelForm:
    """The arithmetic of stored matrices, in float32."""
    settings = {"kind": kind, "dtype": jnp.dtype(jnp.float32)}
    return KernelForm(
        partial(quantised_matmul, **settings), partial(expand, **settings), **settings
    )  # type: ignore[arg-type]
