"""All implementations of low-rank additions on one table of cases, against products of single tokens in float64."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.low_rank import BACKENDS, low_rank, plan_slots
from orca_jax.kernels.low_rank.parts import TILE, Operands

pytestmark = pytest.mark.usefixtures("quick_compiles")


class Case(NamedTuple):
    """Sizes of a launch, and the slot of each token."""

    name: str
    slots: tuple[int, ...]
    num_slots: int
    widths: tuple[int, ...] = (6, 10)
    layer: int = 1
    rank: int = 3
    dtype: str = "float32"


CASES = (
    Case("mixed, with tokens without an adapter", (2, 0, 1, 2, 2, 0, 3, 1, 1), 4),
    Case("one token", (1,), 2),
    Case("no adapter", (0,) * 5, 3),
    Case("a slot for each token", tuple(range(1, 13)), 13),
    Case("full tiles and a rest", (2,) * (2 * TILE + 1) + (1,) * TILE, 3),
    Case("tiles that reach beyond the last token", (0,) * 3 + (4,) * (TILE + 3), 5),
    Case("one projection in the first layer", (1, 1, 2), 3, widths=(7,), layer=0),
    Case("bfloat16", (3, 1, 0, 2, 3), 4, dtype="bfloat16"),
)
QUICK = ("mixed, with tokens without an adapter",)
UNIT = {"float32": 2e-6, "bfloat16": 2e-2}  # largest difference relative to products in float64
LAYERS, INPUTS = 3, 12


@cache
def inputs(case: Case) -> tuple[jax.Array, Operands]:
    draw = np.random.default_rng(5)
    of_slot = np.arange(LAYERS * case.num_slots) % case.num_slots

    def stack(*shape: int) -> jax.Array:
        values = draw.normal(size=(LAYERS * case.num_slots, *shape))
        return jnp.asarray(np.where(of_slot[:, None, None] > 0, values, 0), case.dtype)

    x = jnp.asarray(draw.normal(size=(len(case.slots), INPUTS)), jnp.float32)
    shrink = stack(INPUTS, case.rank * len(case.widths))
    expand = tuple(stack(case.rank, width) for width in case.widths)
    return x, Operands(shrink, expand, case.layer * case.num_slots, case.num_slots)


def one_by_one(case: Case) -> list[np.ndarray]:
    """The additions, token by token."""
    x, operands = inputs(case)
    tokens, shrink = np.asarray(x, np.float64), np.asarray(operands.shrink, np.float64)
    index = case.layer * case.num_slots + np.array(case.slots)
    h = [token @ shrink[i] for token, i in zip(tokens, index, strict=True)]
    parts = [slice(j * case.rank, (j + 1) * case.rank) for j in range(len(case.widths))]
    stacks = [np.asarray(stack, np.float64) for stack in operands.expand]
    return [
        np.array([row[part] @ stack[i] for row, i in zip(h, index, strict=True)])
        for part, stack in zip(parts, stacks, strict=True)
    ]


@pytest.mark.parametrize("is_shared", [False, True], ids=["whole", "parts of the inputs"])
@pytest.mark.parametrize("implementation", [backend.name for backend in BACKENDS])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_case(case: Case, implementation: str, is_shared: bool) -> None:
    x, operands = inputs(case)
    total = (lambda h: 2 * h) if is_shared else None  # two devices with equal parts

    @jax.jit
    def run(x: jax.Array, slots: jax.Array) -> Sequence[jax.Array]:
        plan = plan_slots(slots, case.num_slots)
        return low_rank(x, operands, plan, total=total, implementation=implementation)

    outs = run(x, jnp.array(case.slots, jnp.int32))
    for out, wanted in zip(outs, one_by_one(case), strict=True):
        assert out.dtype == jnp.float32
        difference = np.abs(np.asarray(out) - wanted * (2 if is_shared else 1)).max()
        assert difference <= UNIT[case.dtype] * max(1, np.abs(wanted).max()) * 2


def test_tokens_without_an_adapter_are_in_no_tile() -> None:
    plan = plan_slots(jnp.array([0, 2, 0, 0, 2], jnp.int32), 3)
    assert int(plan.num_tiles) == 1
    assert plan_slots(jnp.zeros(4, jnp.int32), 3).num_tiles == 0


def test_inactive_work_is_left_out_on_a_cpu() -> None:
    case = CASES[0]
    x, operands = inputs(case)
    plan = plan_slots(jnp.array(case.slots, jnp.int32), case.num_slots)
    for out in low_rank(x, operands, plan, jnp.bool_(False), implementation="blocks"):
        assert not np.asarray(out).any()


def test_unknown_implementation() -> None:
    case = CASES[0]
    x, operands = inputs(case)
    with pytest.raises(NotImplementedError, match="use one of blocks, ragged, dense, gather"):
        low_rank(x, operands, plan_slots(jnp.array(case.slots), 4), implementation="none")
