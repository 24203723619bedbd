"""The TPU kernels, run by Pallas' interpreters without a TPU: numerics, races and uninitialised memory."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.ragged_attention import NO_WINDOW, Scores, implementations
from orca_jax.kernels.ragged_attention.cases import CASES, Case, make_arrays
from orca_jax.kernels.ragged_attention.tpu import plan
from orca_jax.kernels.ragged_attention.tpu.attention import attend as ragged_attention_tpu
from orca_jax.kernels.ragged_attention.tpu.blocks import (
    BlockSizes,
    Heads,
    read_table,
    rule,
    write_table,
)
from orca_jax.kernels.ragged_attention.tpu.fetches import RowScalars
from orca_jax.kernels.ragged_attention.tpu.shape import TpuShape
from tests.covering import chosen
from tests.kernels.ragged_attention.oracle import TINY, aspects, meanings, reference
from tests.kernels.strictly import strictly

BY_NAME = {case.name: case for case in CASES}
# interpreted kernels are not the programs that users run
pytestmark = pytest.mark.usefixtures("quick_compiles")


def check(case: Case, interpret: Any, blocks: BlockSizes | None = None) -> None:
    """Compare the kernels' outputs with the oracle's; padding must be finite."""
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, seed=1, layout="token_major"))
    attend = jax.jit(
        lambda a: ragged_attention_tpu(*a, case.scores, blocks=blocks, interpret=interpret)
    )
    actual = np.asarray(attend(arrays), np.float32)
    used = sum(count for count, _ in case.requests)
    np.testing.assert_allclose(
        actual[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance
    )
    assert np.isfinite(actual).all()


def check_strictly(case: Case, blocks: BlockSizes | None) -> None:
    with strictly() as interpret:
        check(case, interpret, blocks)


def test_mixed_phases_without_races() -> None:
    check_strictly(BY_NAME["increments and chunks with padding"], TINY)


def test_page_tables_too_large_for_scalar_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "TABLE_BYTES", 0)
    check_strictly(BY_NAME["increments and chunks with padding"], TINY)


def test_window_and_soft_cap() -> None:
    """Another short case, pages of int8, is in `test_write_and_attend.py`."""
    check(BY_NAME["window and soft cap"], interpret=True)


# Blocks of one request and of several; parts that all queries see, between parts with masks.
LONG = Case("long chunks", ((1, 70), (60, 140), (20, 45)), 2, 1, padding_tokens=2, padding_rows=1)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 61])
def test_parts_without_masks(window: int | None) -> None:
    check(replace(LONG, sliding_window=window), True, TINY)


@pytest.mark.parametrize(
    ("window", "first"), [(40, [8, 8, 4]), (300, [3, 0, 0]), (None, [0, 0, 0])]
)
def test_transfers_begin_at_the_window(window: int | None, first: list[int]) -> None:
    """The last query of 1,000 tokens, in the last three fetches of 8 pages of 16 tokens; the last one is partial."""
    shape = TpuShape(
        1, 1, 128, 16, jnp.float32, 8, 8, 1, 8, window is not None, None, jnp.float32, False
    )
    one = jnp.array([1])
    rows = RowScalars(
        shape,
        jnp.array([0, 1]),
        one - 1,
        one,
        one - 1,
        one,
        1000 * one,
        one,
        jnp.array([window or NO_WINDOW]),
    )
    steps = [(jnp.int32(0), jnp.int32(0), jnp.int32(fetch)) for fetch in (5, 6, 7)]
    assert [int(jnp.minimum(rows.first_page_of(step), 8)) for step in steps] == first
    assert [int(rows.num_pages(step)) for step in steps] == [8, 8, 7]


@pytest.mark.slow
def test_layers_with_several_windows_share_a_kernel() -> None:
    attend = jax.jit(
        lambda a, scores: ragged_attention_tpu(*a, scores, blocks=TINY, interpret=True)
    )
    for window, same in ((61, replace(LONG, sliding_window=61)), (NO_WINDOW, LONG)):
        arrays = jax.tree.map(jnp.asarray, make_arrays(same, seed=1, layout="token_major"))
        used = int(arrays.requests.query_len.sum())
        actual = np.asarray(
            attend(arrays, Scores(0.25, layer_window=jnp.int32(window))), np.float32
        )
        np.testing.assert_allclose(
            actual[:used], reference(same)[:used], rtol=1e-5, atol=LONG.tolerance
        )


def is_short(case: Case) -> bool:
    """True for a case whose tokens fill several blocks only if these are tiny."""
    return sum(context for _, context in case.requests) < 100


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    "case", chosen(filter(is_short, CASES), meanings, size=1), ids=lambda case: case.name
)
def test_short_cases(case: Case) -> None:
    """In the blocks that users have; the others have these in test_every_case_without_races."""
    check(case, interpret=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("case", chosen(CASES, aspects, size=1), ids=lambda case: case.name)
def test_every_case_without_races(case: Case) -> None:
    check_strictly(case, TINY if is_short(case) else None)


def test_head_major_pages_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="token-major pages"):
        ragged_attention_tpu(*jax.tree.map(jnp.asarray, make_arrays(CASES[0])), Scores(1.0))


def test_pages_with_partial_registers_are_refused() -> None:
    case = Case("pages of 8 in bfloat16", ((1, 1),), page_dtype="bfloat16")
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, layout="token_major"))
    with pytest.raises(NotImplementedError, match="multiple of 16, not 8"):
        ragged_attention_tpu(*arrays, Scores(1.0))


def test_it_is_offered_on_tpus_only() -> None:
    assert implementations("cpu") == ("native", "xla", "reference")
    assert "tpu" in implementations("tpu")


@pytest.mark.parametrize("groups", [1, 3, 8, 64])
@pytest.mark.parametrize("kv_heads", [1, 3, 12, 25, 32])
@pytest.mark.parametrize("page_size", [16, 64, 256])
def test_the_rule_keeps_its_bounds(kv_heads: int, groups: int, page_size: int) -> None:
    blocks = rule(Heads("", kv_heads, groups, 128, page_size, 2))
    assert blocks.fetch_pages % blocks.compute_pages == 0
    assert blocks.fetch_pages % blocks.whole_pages == 0
    assert blocks.whole_pages % blocks.compute_pages == 0
    assert 128 % blocks.fetch_pages == 0
    assert blocks.query_block % 16 == 0
    page = page_size * kv_heads * 2 * 128 * 2
    assert blocks.fetch_pages * page <= 4 << 20 or blocks.fetch_pages == 1
    assert 128 % blocks.increment_pages == blocks.increment_pages % blocks.part_pages == 0
    ring = blocks.buffers * blocks.increment_pages * page
    assert ring <= 8 << 20 or (blocks.buffers, blocks.increment_pages) == (2, 1)


def test_the_table_survives_a_round_trip() -> None:
    table = {
        Heads("TPU v5 lite", 8, 4, 128, 64, 2): TINY,
        Heads("TPU v6 lite", 12, 1, 64, 128, 2): TINY,
    }
    assert read_table(write_table(table)) == table
    assert read_table(write_table({})) == {}
