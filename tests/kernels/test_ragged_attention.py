"""One suite for every implementation of ragged attention, against the oracle and against first principles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import KVPages
from orca_jax.kernels.ragged_attention import implementations, ragged_attention
from orca_jax.kernels.ragged_attention.cases import CASES, Arrays, Case, make_arrays

FAST = [name for name in implementations() if name != "reference"]


def run(arrays: Arrays, implementation: str) -> np.ndarray:
    args = jax.tree.map(jnp.asarray, arrays)
    attend = jax.jit(lambda a: ragged_attention(*a, scale=0.25, implementation=implementation))
    return np.asarray(attend(args))


def numpy_attention(case: Case, arrays: Arrays) -> np.ndarray:
    """Each query by itself in float64: what attention means."""
    out = np.zeros(arrays.q.shape)
    groups = case.num_heads // case.num_kv_heads
    for row, (count, context) in enumerate(case.requests):
        pages = arrays.page_table[row]
        k, v = (
            np.concatenate([pool[page].transpose(2, 0, 1) for page in pages]).astype(np.float64)
            for pool in arrays.pages
        )
        for i in range(count):
            token = arrays.query_start[row] + i
            seen = context - count + i + 1
            for head in range(case.num_heads):
                scores = k[:seen, head // groups] @ arrays.q[token, head].astype(np.float64) * 0.25
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ v[:seen, head // groups] / weights.sum()
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_is_attention(case: Case) -> None:
    arrays = make_arrays(case)
    expected = numpy_attention(case, arrays)
    used = int(arrays.query_len.sum())
    np.testing.assert_allclose(run(arrays, "reference")[:used], expected[:used], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", FAST)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case: Case, implementation: str) -> None:
    arrays = make_arrays(case, seed=1)
    used = int(arrays.query_len.sum())
    actual = run(arrays, implementation)
    np.testing.assert_allclose(actual[:used], run(arrays, "reference")[:used], rtol=1e-5, atol=1e-5)
    assert np.isfinite(actual).all(), "padding must stay finite, it flows on through the layers"


@pytest.mark.parametrize("implementation", FAST)
def test_a_request_does_not_depend_on_its_mates(implementation: str) -> None:
    """Selective batching loses nothing: the same queries alone give the same bits."""
    together = Case("together", ((1, 9), (6, 20), (3, 3)))
    arrays = make_arrays(together)
    merged = run(arrays, implementation)
    for row, (count, _) in enumerate(together.requests):
        start = arrays.query_start[row]
        alone = Arrays(
            arrays.q[start : start + count],
            arrays.pages,
            arrays.page_table[row : row + 1],
            np.zeros(1, np.int32),
            arrays.query_len[row : row + 1],
            arrays.context_len[row : row + 1],
        )
        np.testing.assert_allclose(run(alone, implementation), merged[start : start + count], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", FAST)
def test_bfloat16_pages_and_queries(implementation: str) -> None:
    arrays = make_arrays(Case("bf16", ((1, 9), (6, 20)), num_heads=6, num_kv_heads=3))
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else jnp.asarray(x), arrays)
    out = ragged_attention(*low, scale=0.25, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), run(arrays, "reference"), atol=0.05)


def test_unknown_implementation_names_the_known_ones() -> None:
    arrays = make_arrays(CASES[0])
    with pytest.raises(NotImplementedError, match=r"'fast'.*reference, xla"):
        run(arrays, "fast")


def test_heads_that_do_not_group_are_refused() -> None:
    arrays = make_arrays(Case("3 over 2", ((1, 1),), num_heads=4, num_kv_heads=4))
    with pytest.raises(NotImplementedError, match="3 query heads"):
        run(arrays._replace(q=arrays.q[:, :3], pages=KVPages(*(pool[:, :2] for pool in arrays.pages))), "xla")
