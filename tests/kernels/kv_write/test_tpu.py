"""The TPU kernel for writing chunks, run by Pallas' interpreters without a TPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.kernels.kv_pages import TokenMajorPages
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.kv_write.pieces import cut
from orca_jax.kernels.kv_write.tpu import write_chunks
from orca_jax.kernels.ragged_attention.cases import CASES, Case, make_arrays
from tests.kernels.strictly import strictly

# interpreted kernels are not the programs that users run
pytestmark = pytest.mark.usefixtures("quick_compiles")

# Increments, then chunks that begin and end anywhere in a page, fill several pages, and begin at any token.
HARD = Case(
    "pieces",
    ((1, 9), (2, 17), (5, 21), (40, 43), (3, 3)),
    2,
    2,
    64,
    16,
    padding_tokens=3,
    padding_rows=2,
)


def check(case: Case, interpret: Any) -> None:
    """Compare with a scatter of the chunks, bit by bit; slots of increments and other pages must not change."""
    arrays = jax.tree.map(jnp.asarray, make_arrays(case, layout="token_major"))
    pages = arrays.pages
    assert isinstance(pages, TokenMajorPages)
    rng = np.random.default_rng(3)
    k, v = (
        jnp.asarray(rng.standard_normal((arrays.q.shape[0], case.num_kv_heads, case.head_dim)))
        for _ in range(2)
    )
    new = jnp.stack([k, v], axis=2).astype(pages.dtype).reshape(k.shape[0], -1)
    chunks = jnp.where(arrays.requests.query_len > 1, arrays.requests.query_len, 0)
    # The pages of this layer begin at page 2.
    requests = arrays.requests._replace(query_len=chunks).of_layer(jnp.int32(-2))
    count, pieces = cut(case.page_size, new.shape[0], requests)
    pieces = pieces._replace(first_page=jnp.array([2]))
    write = jax.jit(lambda *args: write_chunks(*args, interpret=interpret))
    actual = np.asarray(write(pages, new, count, pieces).kv, np.float32)
    wanted = np.array(pages.kv, np.float32)
    size = case.page_size
    owned = np.ones(wanted.shape[:2], bool)
    for row, count in enumerate(chunks.tolist()):
        for i in range(count):
            index, slot = divmod(int(arrays.requests.context_len[row]) - count + i, size)
            wanted[int(arrays.requests.page_table[row, index]), slot] = np.asarray(
                new[int(arrays.requests.query_start[row]) + i]
            )
        if count:  # slots after the last token are not in use
            index, slot = divmod(int(arrays.requests.context_len[row]), size)
            owned[int(arrays.requests.page_table[row, index]), slot:] = False
    np.testing.assert_array_equal(actual[owned], wanted[owned])


def check_strictly(case: Case) -> None:
    with strictly() as interpret:
        check(case, interpret)


def test_pieces_without_races() -> None:
    check_strictly(HARD)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bfloat16", "more queries than one block", "25 heads of 64", "pages of 256 tokens"]
)
def test_cases_without_races(name: str) -> None:
    check_strictly(next(case for case in CASES if case.name == name))


@pytest.mark.parametrize(("page_dtype", "group"), [("bfloat16", 16), ("int8", 32)])
def test_pages_that_it_cannot_write_are_refused(page_dtype: Any, group: int) -> None:
    arrays = jax.tree.map(
        jnp.asarray,
        make_arrays(Case("pages of 8", ((2, 2),), page_dtype=page_dtype), layout="token_major"),
    )
    new = jnp.ones((2, 4, 16))
    with pytest.raises(NotImplementedError, match=rf"multiple of {group}, not 8"):
        write_kv(arrays.pages, new, new, arrays.requests, implementation="tpu")
