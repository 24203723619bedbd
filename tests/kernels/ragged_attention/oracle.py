"""Cases of increments, and the output of the oracle for a case."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.cases import Arrays, Case, make_arrays

INCREMENTS = [
    Case("one page, partly filled", ((1, 1), (1, 15)), page_size=16),
    Case("whole pages and parts of one", ((1, 16), (1, 17), (1, 64)), page_size=16, padding_tokens=2, padding_rows=1),
    Case("pages of 128, heads of 64", ((1, 200), (1, 129), (1, 128), (1, 3)), 4, 4, 64, 128),
    Case("two heads of each KV head", ((1, 200), (1, 31)), 6, 3, 64, 32),
    Case("four small heads of each KV head", ((1, 200), (1, 31)), 8, 2, 8, 32),
    Case("window within a page", ((1, 5), (1, 64), (1, 70)), page_size=32, sliding_window=6),
    Case("window over pages, soft cap", ((1, 40), (1, 90)), 4, 2, page_size=16, sliding_window=37, soft_cap=2.0),
    Case("soft cap", ((1, 40), (1, 90)), 4, 2, page_size=16, soft_cap=2.0),
    Case("increments in bfloat16", ((1, 40), (1, 33)), 6, 3, dtype="bfloat16", page_dtype="bfloat16", page_size=16),
    Case("float16", ((1, 40), (1, 33)), 6, 3, dtype="float16", page_dtype="float16", page_size=16),
]


def run(arrays: Arrays, case: Case, implementation: str) -> np.ndarray:
    args = jax.tree.map(jnp.asarray, arrays)
    attend = jax.jit(lambda a: ragged_attention(*a, case.scores, implementation=implementation))
    return np.asarray(attend(args))


@cache
def reference(case: Case) -> np.ndarray:
    """The output of the oracle for a case with seed 1, to compare other backends with. It may run slowly."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        return run(make_arrays(case, seed=1), case, "reference").astype(np.float32)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
