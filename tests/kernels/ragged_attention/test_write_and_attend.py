"""Writing and attending at once on TPUs, without a TPU: against one after the other, by Pallas' interpreters."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import TokenMajorPages
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention import RowArrays, ragged_attention
from orca_jax.kernels.ragged_attention.cases import CASES, Case, make_arrays
from orca_jax.kernels.ragged_attention.tpu.attention import write_and_attend_tpu
from orca_jax.kernels.ragged_attention.tpu.blocks import BlockSizes
from orca_jax.kernels.ragged_attention.tpu.plan import blocks_for, plan_attention
from tests.covering import chosen
from tests.kernels.ragged_attention.oracle import TINY, meanings
from tests.kernels.strictly import strictly

# interpreted kernels are not the programs that users run
pytestmark = pytest.mark.usefixtures("quick_compiles")
BY_NAME = {case.name: case for case in CASES}
# Tokens that open a page, close one, and stand anywhere; contexts of one step and of several; more rows than a block.
HARD = Case(
    "places",
    ((1, 1), (1, 8), (1, 9), (1, 33), (1, 40), (5, 21), (3, 3)),
    padding_tokens=3,
    padding_rows=2,
)
TAKEN = chosen(
    [case for case in CASES if case.page_dtype in ("float32", "bfloat16")], meanings, size=1
)


def check(case: Case, interpret: Any, blocks: BlockSizes | None = None) -> None:
    """Outputs are the oracle's after a scatter, and so is every slot that somebody may read."""
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, seed=1, layout="token_major"))
    q, pages, requests = arrays
    rng = np.random.default_rng(3)
    shape = q.shape[0], case.num_kv_heads, case.head_dim
    k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2))
    options = {"blocks": blocks, "interpret": interpret}

    # Of a layer whose pages begin at the third.
    plan = plan_attention(
        q, pages, requests.of_layer(jnp.int32(-2)), blocks or blocks_for(q, pages)
    ).of_layer(jnp.int32(2))
    actual, written = jax.jit(partial(write_and_attend_tpu, **options))(
        q, k, v, pages, plan, case.scores
    )
    scattered = write_kv(pages, k, v, requests, implementation="scatter")
    wanted = ragged_attention(q, scattered, requests, case.scores, implementation="reference")
    used = sum(count for count, _ in case.requests)
    np.testing.assert_allclose(
        np.asarray(actual, np.float32)[:used],
        np.asarray(wanted, np.float32)[:used],
        rtol=1e-5,
        atol=case.tolerance,
    )
    assert isinstance(written, TokenMajorPages)
    owned = slots_with_tokens(case, arrays.requests.page_table)
    np.testing.assert_array_equal(
        *(np.asarray(x.kv, np.float32)[owned] for x in (written, scattered))
    )
    others = np.setdiff1d(np.arange(pages.kv.shape[0]), np.unique(np.nonzero(owned)[0]))
    np.testing.assert_array_equal(*(np.asarray(x.kv, np.float32)[others] for x in (written, pages)))


def slots_with_tokens(case: Case, page_table: np.ndarray) -> np.ndarray:
    owned = np.zeros((page_table.size + 1, case.page_size), bool)  # one page is in no table
    for row, (_, context) in enumerate(case.requests):
        page, place = np.divmod(np.arange(context), case.page_size)
        owned[np.asarray(page_table)[row, page], place] = True
    return owned


def check_strictly(case: Case, blocks: BlockSizes | None) -> None:
    with strictly() as interpret:
        check(case, interpret, blocks)


@pytest.mark.slow
def test_places_without_races() -> None:
    check_strictly(HARD, TINY)


def kernels_outside_conditions(jaxpr: Any) -> list[str]:
    """Kernels that run whatever the requests are."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(str(equation.params["name"]))
        elif equation.primitive.name != "cond":
            inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
            found += [
                name
                for part in inner
                if hasattr(part, "eqns")
                for name in kernels_outside_conditions(part)
            ]
    return found


@pytest.mark.parametrize("name", ["increments and chunks with padding", "int8 pages"])
def test_no_kernel_runs_for_nothing(name: str) -> None:
    """The grids follow the requests, and a grid of zero programs is undefined: kernels are within conditions.

    `write_chunks` has at least one program, which does nothing without pieces.
    """
    case = BY_NAME[name]
    q, pages, requests = jax.tree.map(jnp.asarray, make_arrays(case, layout="token_major"))
    new = jnp.zeros((q.shape[0], case.num_kv_heads, case.head_dim))

    def layer(q: jax.Array, pages: TokenMajorPages, requests: RowArrays) -> Any:
        plan = plan_attention(q, pages, requests, blocks_for(q, pages))
        written = write_kv(pages, new, new, requests, implementation="tpu")
        return write_and_attend_tpu(q, new, new, written, plan, case.scores)

    traced = jax.make_jaxpr(layer)(q, pages, requests)
    assert "pallas_call" in str(traced)
    assert {*kernels_outside_conditions(traced.jaxpr)} <= {"write_chunks"}


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    "case",
    [HARD, *(pytest.param(case, marks=pytest.mark.slow) for case in TAKEN)],
    ids=lambda case: case.name,
)
def test_every_case(case: Case) -> None:
    check(case, interpret=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["bfloat16", "25 heads of 64", "sliding window"])
def test_cases_without_races(name: str) -> None:
    case = BY_NAME[name]
    check_strictly(case, TINY if sum(context for _, context in case.requests) < 100 else None)


@pytest.mark.slow
def test_quantised_pages_are_written_first() -> None:
    case = BY_NAME["int8 pages"]
    q, pages, requests = jax.tree.map(jnp.asarray, make_arrays(case, seed=1, layout="token_major"))
    rng = np.random.default_rng(3)
    k, v = (jnp.asarray(rng.standard_normal((q.shape[0], 3, 64)), q.dtype) for _ in range(2))
    plan = plan_attention(q, pages, requests, blocks_for(q, pages))
    layer = jax.jit(partial(write_and_attend_tpu, interpret=True))
    actual, written = layer(q, k, v, pages, plan, case.scores)
    wanted_pages = write_kv(pages, k, v, requests, implementation="pages")
    wanted = ragged_attention(q, wanted_pages, requests, case.scores, implementation="reference")
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (actual, wanted)), rtol=1e-5, atol=case.tolerance
    )
    owned = slots_with_tokens(case, requests.page_table)
    np.testing.assert_array_equal(
        *(np.asarray(x.kv, np.float32)[owned] for x in (written, wanted_pages))
    )
