"""Both ways to write K and V, over the case table of attention and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import KVPages
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention.cases import CASES, Case, make_arrays

IMPLEMENTATIONS = ["scatter", "blocks"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_token_lands_in_its_slot_and_nothing_else_changes(case: Case, implementation: str) -> None:
    arrays = make_arrays(case)
    rng = np.random.default_rng(7)
    shape = (arrays.q.shape[0], case.num_kv_heads, case.head_dim)
    k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    expected = [pool.copy() for pool in arrays.pages]
    for row, (count, context) in enumerate(case.requests):
        for i in range(count):
            index, place = divmod(context - count + i, case.page_size)
            for pool, new in zip(expected, (k, v), strict=True):
                pool[arrays.page_table[row, index], :, :, place] = new[arrays.query_start[row] + i]
    requests = arrays.page_table, arrays.query_start, arrays.query_len, arrays.context_len
    write = jax.jit(lambda *args: write_kv(*args, implementation=implementation))
    written = write(*jax.tree.map(jnp.asarray, (arrays.pages, k, v, *requests)))
    for pool, wanted in zip(written, expected, strict=True):
        np.testing.assert_array_equal(pool, wanted)


def test_values_are_cast_to_the_pages() -> None:
    pages = KVPages(*(jnp.zeros((2, 1, 4, 8), jnp.bfloat16) for _ in range(2)))
    one = jnp.ones((1, 1, 4))
    written = write_kv(pages, one, 2 * one, *(jnp.array(x, jnp.int32) for x in ([[1]], [0], [1], [3])))
    assert written.v.dtype == jnp.bfloat16
    assert np.asarray(written.v[1, 0, :, 2], np.float32).tolist() == [2.0] * 4


def test_an_unknown_implementation_is_named() -> None:
    pages = KVPages(*(jnp.zeros((2, 1, 4, 8)) for _ in range(2)))
    one = jnp.ones((1, 1, 4))
    rows = (jnp.array(x, jnp.int32) for x in ([[1]], [0], [1], [3]))
    with pytest.raises(NotImplementedError, match="'fast'"):
        write_kv(pages, one, one, *rows, implementation="fast")
