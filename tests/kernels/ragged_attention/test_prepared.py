"""What a backend prepares for several page tables can be stacked, and a traced index selects one of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import KVPages, TokenMajorPages
from orca_jax.kernels.ragged_attention import RowArrays, prepare, ragged_attention, write_and_attend
from orca_jax.kernels.ragged_attention.cases import Case, make_arrays
from orca_jax.kernels.ragged_attention.tpu.attention import attend_prepared
from orca_jax.values.config import PageLayout
from tests.kernels.native.machine import needs_library

CASE = Case(
    "groups",
    ((1, 20), (1, 33), (7, 30)),
    2,
    1,
    64,
    16,
    padding_tokens=2,
    padding_rows=1,
    sliding_window=19,
)
ON_CPUS = ["reference", "xla", pytest.param("native", marks=needs_library), "gather"]
ELSEWHERE = ["tpu", "gpu", "triton"]


def two_tables(layout: PageLayout) -> tuple[Any, KVPages, list[RowArrays]]:
    """Queries, pages, and the same requests in two parts of the pages, with other lengths."""
    q, pages, requests = jax.tree.map(jnp.asarray, make_arrays(CASE, layout=layout))
    num_pages = jax.tree.leaves(pages)[0].shape[0]
    pages = jax.tree.map(
        lambda pool: jnp.concatenate([jnp.nan_to_num(pool, nan=0.5), pool[::-1]]), pages
    )
    shorter = requests._replace(
        context_len=jnp.maximum(requests.context_len - 16, requests.query_len)
    )
    table = 2 * num_pages - 1 - requests.page_table
    return q, pages, [shorter, requests._replace(page_table=table)]


def stacked(prepared: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *prepared)


def slow(name: Any) -> Any:
    """A slow case, with the marks that its name may have."""
    if isinstance(name, str):
        return pytest.param(name, marks=pytest.mark.slow)
    return pytest.param(*name.values, marks=[*name.marks, pytest.mark.slow])


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("name", [name if name == "xla" else slow(name) for name in ON_CPUS])
def test_a_traced_group_selects_what_was_prepared(name: str) -> None:
    q, pages, tables = two_tables("head_major")
    device = jax.devices()[0]
    new = jnp.asarray(np.random.default_rng(2).standard_normal((2, q.shape[0], 1, 64)), jnp.float32)
    layer = partial(write_and_attend, device, q, *new, pages, implementation=name)
    plans = [
        prepare(device, jax.ShapeDtypeStruct(q.shape, q.dtype), pages, table, name)
        for table in tables
    ]

    @jax.jit
    def scan(plans: Any) -> jax.Array:
        def body(_: None, group: jax.Array) -> tuple[None, jax.Array]:
            return None, layer(
                jax.tree.map(lambda leaf: leaf[group], plans), jnp.int32(0), CASE.scores
            )[0]

        return jax.lax.scan(body, None, jnp.arange(2))[1]

    used = int(tables[0].query_len.sum())
    for found, plan in zip(scan(stacked(plans)), plans, strict=True):
        direct, _ = jax.jit(layer)(plan, jnp.int32(0), CASE.scores)
        np.testing.assert_allclose(found[:used], direct[:used], rtol=1e-6, atol=1e-6)
    assert not np.allclose(*(x[:used] for x in scan(stacked(plans)))), "the groups differ"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_a_traced_group_selects_a_plan_for_tpus() -> None:
    q, pages, tables = two_tables("token_major")
    assert isinstance(pages, TokenMajorPages)
    plans = [
        prepare(jax.devices()[0], jax.ShapeDtypeStruct(q.shape, q.dtype), pages, each, "tpu")
        for each in tables
    ]
    used = int(tables[0].query_len.sum())

    @jax.jit
    def attend(plans: Any, group: jax.Array) -> jax.Array:
        plan = jax.tree.map(lambda leaf: leaf[group], plans).of_layer(jnp.int32(0))
        return attend_prepared(q, pages, plan, CASE.scores, interpret=True)

    for group, requests in enumerate(tables):
        wanted = ragged_attention(q, pages, requests, CASE.scores, implementation="reference")
        found = attend(stacked(plans), jnp.int32(group))
        np.testing.assert_allclose(found[:used], wanted[:used], rtol=1e-5, atol=CASE.tolerance)


@pytest.mark.parametrize("name", [*ON_CPUS, *ELSEWHERE])
def test_equal_shapes_give_equal_structures(name: str) -> None:
    """Stacking then needs no knowledge of the backend: all leaves are arrays."""
    q, pages, tables = two_tables("token_major" if name in ELSEWHERE else "head_major")
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    plans = [prepare(jax.devices()[0], shape, pages, table, name) for table in tables]
    assert len({jax.tree.structure(plan) for plan in plans}) == 1
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(plans))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(stacked(plans))} == {2}
