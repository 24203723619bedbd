"""All implementations of the experts' MLPs on one table of cases, against products of single tokens in float64."""

from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.expert_mlp import BACKENDS, ExpertBiases, ExpertKernels, expert_mlp
from orca_jax.kernels.expert_mlp.blocks import LARGE, SMALL, block_rows
from tests.covering import covering, slow

pytestmark = pytest.mark.usefixtures("quick_compiles")


class Case(NamedTuple):
    """Sizes of a batch, and the share of experts that tokens choose from."""

    name: str
    tokens: int
    per_token: int
    experts: int
    embed: int = 12
    width: int = 20
    used: float = 1.0
    has_biases: bool = False
    dtype: str = "float32"


CASES = (
    Case("one token", 1, 2, 4),
    Case("one expert", 5, 1, 1),
    Case("all experts of each token", 7, 4, 4),
    Case("many experts, most without tokens", 9, 2, 33),
    Case("few experts in use", 40, 2, 16, used=0.2),
    Case("full blocks of one expert", 2 * SMALL, 1, 9, used=0.1),
    Case("large blocks", 70, 2, 3),
    Case("a large block and one row", LARGE + 1, 1, 2, used=0.5),
    Case("biases", 37, 2, 5, used=0.7, has_biases=True),
    Case("bfloat16", 21, 3, 5, dtype="bfloat16"),
)
QUICK = ("large blocks", "biases")
NAMES = [backend.name for backend in BACKENDS]
UNIT = {"float32": 2e-6, "bfloat16": 2e-2}  # largest difference relative to products in float64


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.relu(gate) * up


@cache
def inputs(case: Case) -> tuple[jax.Array, jax.Array, jax.Array, ExpertKernels]:
    draw = np.random.default_rng(3)
    allowed = max(case.per_token, int(case.experts * case.used))
    chosen = np.stack([draw.permutation(allowed)[: case.per_token] for _ in range(case.tokens)])
    shape = case.experts, case.embed, case.width
    kernels = [
        draw.normal(size=size) for size in (shape, shape, (case.experts, case.width, case.embed))
    ]
    x, weights = draw.normal(size=(case.tokens, case.embed)), draw.random(size=chosen.shape)
    floats = (
        jnp.asarray(x, jnp.float32),
        jnp.asarray(chosen, jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )
    biases = [
        draw.normal(size=(case.experts, size)) for size in (case.width, case.width, case.embed)
    ]
    stored = (
        ExpertBiases(*(jnp.asarray(bias, jnp.float32) for bias in biases))
        if case.has_biases
        else None
    )
    return *floats, ExpertKernels(*(jnp.asarray(kernel, case.dtype) for kernel in kernels), stored)


def compiled(implementation: str | None) -> Any:
    """The operation as one program."""
    return jax.jit(partial(expert_mlp, activation=gated, implementation=implementation))


def one_by_one(case: Case) -> np.ndarray:
    """The results, token by token and expert by expert."""
    x, chosen, weights, gate, up, down, *biases = (
        np.asarray(value, np.float64) for value in jax.tree.leaves(inputs(case))
    )
    of_gate, of_up, of_down = biases or np.zeros((3, case.experts, 1))
    out = np.zeros_like(x)
    for token, expert in np.ndindex(chosen.shape):
        number = int(chosen[token, expert])
        hidden = np.maximum(x[token] @ gate[number] + of_gate[number], 0) * (
            x[token] @ up[number] + of_up[number]
        )
        out[token] += weights[token, expert] * (hidden @ down[number] + of_down[number])
    return out


@pytest.mark.parametrize(
    ("case", "implementation"),
    covering(product([case for case in CASES if case.name in QUICK], NAMES), size=1)
    + [slow(*each) for each in product([case for case in CASES if case.name not in QUICK], NAMES)],
    ids=lambda x: x.name if isinstance(x, Case) else x,
)
def test_case(case: Case, implementation: str) -> None:
    out = compiled(implementation)(*inputs(case))
    wanted = one_by_one(case)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, wanted, rtol=0, atol=UNIT[case.dtype] * np.abs(wanted).max())


@pytest.mark.parametrize("implementation", NAMES)
def test_a_token_with_nan_disturbs_no_other(implementation: str) -> None:
    """Such as padding, whose numbers have no meaning."""
    case = CASES[6]
    x, *others = inputs(case)
    out = compiled(implementation)(
        jnp.asarray(np.where(np.arange(case.tokens)[:, None] == 3, np.nan, x)), *others
    )
    is_nan = np.isnan(np.asarray(out)).any(axis=1)
    assert np.flatnonzero(is_nan).tolist() == [3]


def test_on_a_cpu_experts_without_tokens_are_not_computed() -> None:
    case = CASES[4]
    x, chosen, weights, kernels = inputs(case)
    unused = np.setdiff1d(np.arange(case.experts), np.asarray(chosen))
    assert len(unused) > case.experts / 2
    is_unused = np.isin(np.arange(case.experts), unused)[:, None, None]
    broken = ExpertKernels(
        *(jnp.asarray(np.where(is_unused, np.float32(np.nan), kernel)) for kernel in kernels[:3])
    )
    out = compiled("blocks")(x, chosen, weights, broken)
    wanted = one_by_one(case)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=UNIT[case.dtype] * np.abs(wanted).max())


def test_the_default_of_a_cpu_is_blocks() -> None:
    arguments = inputs(CASES[0])

    def program(implementation: str | None) -> str:
        return (
            compiled(implementation).trace(*arguments).lower(lowering_platforms=("cpu",)).as_text()
        )

    assert "stablehlo.while" in program("blocks") and "stablehlo.while" not in program("dense")
    assert program(None).count("stablehlo.dot_general") == program("blocks").count(
        "stablehlo.dot_general"
    )
    assert "stablehlo.while" in program(None)


def test_sizes_of_blocks() -> None:
    assert block_rows(8 * 16, 8) == LARGE
    assert block_rows(8 * 16 - 1, 8) == SMALL


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(
        NotImplementedError, match=r"'loop'; use one of blocks, ragged, triton, dense"
    ):
        expert_mlp(*inputs(CASES[0]), activation=gated, implementation="loop")
