"""The checks of shapes: which functions have them, and that a wrong shape fails."""

import ast

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from orca_jax.kernels.short_conv import short_conv
from orca_jax.kernels.state_rows import StateRows
from tests.shapes.hook import names_shapes


@pytest.mark.parametrize(
    ("header", "is_checked"),
    [
        ('def f(x: Float[Array, "T"]) -> None', True),
        ('def f(x: int, *rest: Int[Array, "N"] | None) -> None', True),
        ('def f() -> tuple[Array, Bool[Array, " T"]]', True),
        ("def f(x: Array, sizes: Sequence[int], *, name: str) -> tuple[Array, ...]", False),
        ("def f(x)", False),
    ],
)
def test_functions_that_name_shapes(header: str, is_checked: bool) -> None:
    (function,) = ast.parse(f"{header}: ...").body
    assert isinstance(function, ast.FunctionDef) and names_shapes(function) == is_checked


def test_a_wrong_shape_fails() -> None:
    """A kernel of four channels does not suit inputs of three."""
    rows = StateRows(*(jnp.zeros(1, jnp.int32) for _ in range(4)), is_fresh=jnp.zeros(1, bool))
    with pytest.raises(TypeCheckError, match="kernel"):
        short_conv(jnp.zeros((2, 3)), jnp.zeros((2, 4)), jnp.zeros((1, 3)), rows)
