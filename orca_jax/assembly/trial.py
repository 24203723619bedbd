"""A trial of the library's products against XLA's, for processors on which docs/benchmarks.md has no measurement."""

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from orca_jax.kernels.matmul import matmul
from orca_jax.kernels.native import pack, packed_product

logger = logging.getLogger(__name__)

ROWS = (8, 256)
"""Numbers of rows: few ones, for which a product waits for the memory, and many."""

# together larger than most caches
_INPUTS = 1024
_OUTPUTS = 2048
_MATRICES = 8
_REPEATS = 5

type _Product = Callable[[Array, Array], Array]


def is_faster(width: int, dtype: str, directory: str | None, name: str) -> bool:
    """True if the library's products are faster than XLA's, on average over `ROWS`.

    Args:
        width: columns of a block of the library's packed matrices.
        dtype: the type of the matrices.
        directory: keeps the result, so that later starts on this machine agree; None measures once in a process.
        name: name of the library.
    """
    file = None if directory is None else Path(directory) / f"{name}-{dtype}.json"
    ratios = _kept(file) if file is not None else None
    if ratios is None:
        ratios = measured(width, dtype)
        if file is not None:
            _keep(file, ratios)
    chosen = math.prod(ratios) >= 1
    times = " and ".join(
        f"{ratio:.2f} with {rows} rows" for rows, ratio in zip(ROWS, ratios, strict=True)
    )
    name = "the library" if chosen else "XLA"
    logger.info(
        "products in %s by %s; the time of XLA over that of the library: %s", dtype, name, times
    )
    return chosen


@cache
def measured(width: int, dtype: str) -> Sequence[float]:
    """The time of XLA's products over that of the library's, for each number of rows."""
    plain = [jnp.full((_INPUTS, _OUTPUTS), 0.01 * index, dtype) for index in range(_MATRICES)]
    packed = [jax.jit(pack, static_argnums=1)(matrix, width) for matrix in plain]
    ratios = []
    for rows in ROWS:
        x = jnp.full((rows, _INPUTS), 0.01, dtype)
        runs = [_program(matmul, x, plain), _program(packed_product, x, packed)]
        taken: list[list[float]] = [[], []]
        for _ in range(_REPEATS):
            for run, seconds in zip(runs, taken, strict=True):
                start = time.perf_counter()
                run().block_until_ready()
                seconds.append(time.perf_counter() - start)
        ratios.append(min(taken[0]) / min(taken[1]))
    return ratios


def _program(
    multiply: _Product, x: Float[Array, "T I"], matrices: Sequence[Array]
) -> Callable[[], Array]:
    """A function that runs the products with all matrices; it is compiled and has run once."""

    def run(x: Float[Array, "T I"], *matrices: Array) -> Float[Array, "T O"]:
        return sum((multiply(x, matrix) for matrix in matrices[1:]), multiply(x, matrices[0]))

    compiled = jax.jit(run).lower(x, *matrices).compile()
    call: Callable[[], Array] = partial(compiled, x, *matrices)
    call().block_until_ready()
    return call


def _kept(file: Path) -> Sequence[float] | None:
    """The ratios of an earlier start; None if there are none for these rows."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads(file.read_text(encoding="utf-8"))
        return [float(found[str(rows)]) for rows in ROWS]
    return None


def _keep(file: Path, ratios: Sequence[float]) -> None:
    text = json.dumps(dict(zip(map(str, ROWS), ratios, strict=True)))
    with contextlib.suppress(OSError):  # a directory that cannot be written
        part = file.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(file)
