"""The TPU kernels of latents, run by Pallas' interpreters without a TPU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import HeadMajorPages
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention import Scores, implementations, ragged_attention
from orca_jax.kernels.ragged_attention.cases import CASES, LATENT_CASES, Case, make_arrays
from orca_jax.kernels.ragged_attention.self_test import Trial, try_kernels
from orca_jax.kernels.ragged_attention.tpu import latents
from orca_jax.kernels.ragged_attention.tpu.blocks import BlockSizes, Heads, rule
from orca_jax.kernels.ragged_attention.tpu.latents import attend, write_and_attend
from orca_jax.kernels.ragged_attention.tpu.plan import blocks_for, plan_attention
from tests.kernels.ragged_attention.oracle import TINY, reference
from tests.kernels.strictly import strictly

BY_NAME = {case.name: case for case in LATENT_CASES}
# interpreted kernels are not the programs that users run
pytestmark = pytest.mark.usefixtures("quick_compiles")
QUICK = ("latents: both phases", "latents in int8")
ALL = [
    case if case.name in QUICK else pytest.param(case, marks=pytest.mark.slow)
    for case in LATENT_CASES
]


def check(case: Case, interpret: Any, blocks: BlockSizes | None = None) -> None:
    """Compare the kernels' outputs with the oracle's; padding must be finite."""
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, seed=1))
    run = jax.jit(lambda a: attend(*a, case.scores, blocks=blocks, interpret=interpret))
    actual = np.asarray(run(arrays), np.float32)
    used = sum(count for count, _ in case.requests)
    np.testing.assert_allclose(
        actual[:used], reference(case)[:used], rtol=1e-5, atol=case.tolerance
    )
    assert np.isfinite(actual).all()


def check_written(case: Case, interpret: Any, blocks: BlockSizes | None = None) -> None:
    """Outputs are the oracle's after a write in plain XLA, and so is every slot that somebody may read."""
    q, pages, requests = jax.tree.map(jnp.asarray, make_arrays(case, seed=1))
    assert isinstance(pages, HeadMajorPages)
    new = np.random.default_rng(3).standard_normal((q.shape[0], 1, case.head_dim))
    k = jnp.asarray(new, q.dtype)
    # Of a layer whose pages begin at the third.
    plan = plan_attention(
        q, pages, requests.of_layer(jnp.int32(-2)), blocks or blocks_for(q, pages)
    )
    layer = jax.jit(partial(write_and_attend, blocks=blocks, interpret=interpret))
    actual, written = layer(q, k, None, pages, plan, jnp.int32(2), case.scores)
    right = write_kv(pages, k, None, requests, implementation="pages")
    wanted = ragged_attention(q, right, requests, case.scores, implementation="reference")
    used = sum(count for count, _ in case.requests)
    found, expected = (np.asarray(out[:used], np.float32) for out in (actual, wanted))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=case.tolerance)
    is_other = np.ones(pages.k.shape[0], bool)
    for row, (_, context) in enumerate(case.requests):
        listed = np.asarray(requests.page_table[row])[: -(-context // case.page_size)]
        is_other[listed] = False
        for one, other in zip(numbers(written), numbers(right), strict=True):
            tokens = (np.concatenate([*x[listed]], axis=-1) for x in (one, other))
            np.testing.assert_array_equal(*(x[..., :context] for x in tokens))
    for one, other in zip(numbers(written), numbers(pages), strict=True):
        np.testing.assert_array_equal(one[is_other], other[is_other])


def numbers(pages: HeadMajorPages) -> list[np.ndarray]:
    """The arrays of pages, in a type whose NaN are equal to each other."""
    return [np.asarray(array, np.float32) for array in jax.tree.leaves(pages)]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_every_case(case: Case) -> None:
    check(case, True)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_new_tokens_are_written(case: Case) -> None:
    check_written(case, True, TINY)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
def test_every_case_without_races(case: Case) -> None:
    with strictly() as interpret:
        check_written(case, interpret, TINY)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_the_self_test_finds_a_wrong_kernel(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(*arguments: Any) -> Any:
        out, pages = write_and_attend(*arguments, interpret=True)
        return out + wrong, pages

    monkeypatch.setattr(latents, "write_and_attend", layer)
    trial = Trial(4, 1, 48, 128, "float32", "float32", has_values=False)
    problem = try_kernels(trial, "tpu_latents", jax.devices()[0])
    assert (problem is None) == (wrong == 0.0)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (CASES[0], "without values"),
        (Case("", ((1, 1),), 4, 1, 48, 64, has_values=False), "multiple of 128, not 64"),
        (Case("", ((1, 1),), 4, 2, 48, 128, has_values=False), "of one head"),
    ],
)
def test_other_pages_are_refused(case: Case, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        attend(*jax.tree.map(jnp.asarray, make_arrays(case)), Scores(1.0))


def test_they_are_offered_on_tpus_only() -> None:
    assert "tpu_latents" in implementations("tpu")
    assert "tpu_latents" not in {*implementations("cpu"), *implementations("gpu")}


@pytest.mark.parametrize("heads", [2, 4, 5, 8, 16, 20, 64, 128])
def test_blocks_of_queries_fill_tiles(heads: int) -> None:
    """Sixteen rows are a tile in bfloat16; 2,048 rows of sums would not fit beside the pages."""
    blocks = rule(Heads("", 1, heads, 576, 128, 2, has_values=False))
    assert blocks.query_block * heads % 16 == 0
    assert blocks.query_block * heads <= 512
    assert blocks.fetch_pages % blocks.whole_pages == blocks.whole_pages % blocks.compute_pages == 0
