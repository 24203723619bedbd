"""Measures attention on this CPU: matrix products, sums over parts of a page, and the library in C.

    python -m lab.measured.attention [--dtype bfloat16] [--rows 32] [--context 300] [--repeats 9]
    python -m lab.measured.attention --dtype float32 --rows 1 --queries 512 --context 4096 --layers 1 --devices 1

Runs the forms in alternation, over some layers and on two devices, and prints the median
milliseconds of each, the ratio of the faster form of XLA to the library, and the rate at which the library reads the
keys and values of all contexts. With several queries of each request both forms of XLA are matrix products. The last
line is JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.kernels.kv_pages import HeadMajorPages
from orca_jax.kernels.native import load_library
from orca_jax.kernels.ragged_attention import RowArrays, Scores, native, xla

PAGE_SIZE = 128
SHAPES = (
    (9, 3, 64),
    (12, 12, 64),
    (8, 8, 128),
    (32, 8, 128),
    (8, 2, 128),
    (64, 8, 128),
)  # query heads, KV heads, head dim
BY_HEAD = PartitionSpec(None, "heads")


class Programs(NamedTuple):
    """A compiled program for each form of attention."""

    products: Callable[..., Any]
    sums: Callable[..., Any]
    library: Callable[..., Any]


def program(shape: tuple[int, int, int], options: argparse.Namespace) -> tuple[Programs, list[Any]]:
    """All layers of one launch by each form, and the arguments. The contexts differ by up to a page."""
    heads, kv_heads, head_dim = shape
    rows = options.rows
    count = options.queries
    context = options.context
    dtype = options.dtype
    draw = np.random.default_rng(0)
    mesh = Mesh(np.array(jax.devices()), ("heads",))
    per_row = -(-context // PAGE_SIZE)
    num_pages = rows * per_row
    place = partial(jax.device_put, device=NamedSharding(mesh, BY_HEAD))
    size = options.layers * num_pages, kv_heads, head_dim, PAGE_SIZE
    pages = HeadMajorPages(
        *(place(jnp.asarray(draw.random(size, np.float32), dtype)) for _ in range(2))
    )
    queries = place(jnp.asarray(draw.random((rows * count, heads, head_dim), np.float32)))
    table = jnp.asarray(draw.permutation(num_pages).reshape(rows, per_row), jnp.int32)
    lengths = jnp.asarray(
        context - draw.integers(0, min(PAGE_SIZE, context - count + 1), rows), jnp.int32
    )
    starts = count * jnp.arange(rows, dtype=jnp.int32)
    counts = jnp.full(rows, count, jnp.int32)

    def layers(
        attend: Callable[..., jax.Array],
        q: jax.Array,
        pages: HeadMajorPages,
        table: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        def layer(index: jax.Array, x: jax.Array) -> jax.Array:
            requests = RowArrays(table + index * num_pages, starts, counts, lengths)
            return attend(x, pages, requests, Scores(head_dim**-0.5))

        return jax.lax.fori_loop(0, options.layers, layer, q)

    everywhere = PartitionSpec()
    specs = BY_HEAD, HeadMajorPages(BY_HEAD, BY_HEAD), everywhere, everywhere  # type: ignore[arg-type]
    args: list[Any] = [queries, pages, table, lengths]

    def compiled(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
        run = partial(layers, attend)
        split = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=BY_HEAD, check_vma=False)
        return jax.jit(split).lower(*args).compile()

    with patch.object(xla, "has_form", lambda *_: False):
        products = compiled(xla.attend)
    with patch.object(xla, "has_form", lambda *_: True):
        sums = compiled(xla.attend)
    return Programs(products, sums, compiled(native.attend)), args


def seconds(run: Callable[..., Any], args: list[Any]) -> float:
    """The time of one run."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start


def measure(shape: tuple[int, int, int], options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of all forms, medians, and the ratio."""
    programs, args = program(shape, options)
    results = [np.asarray(form(*args)) for form in programs]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=0.02, atol=0.02)
    taken = np.array([[seconds(form, args) for form in programs] for _ in range(options.repeats)])
    of_products, of_sums, of_library = np.median(taken, axis=0)
    num_bytes = (
        2
        * options.layers
        * shape[1]
        * shape[2]
        * jnp.dtype(options.dtype).itemsize
        * int(args[3].sum())
    )
    return {
        "products_ms": round(1e3 * of_products, 1),
        "sums_ms": round(1e3 * of_sums, 1),
        "library_ms": round(1e3 * of_library, 1),
        "ratio": round(min(of_products, of_sums) / of_library, 2),
        "library_gb_per_s": round(num_bytes / of_library / 1e9, 1),
    }


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument(
        "--queries", type=int, default=1, help="of each request, at most its context"
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--devices", type=int, default=2, help="that share the heads")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    if load_library(None) is None:
        sys.exit("this machine has no such library: it needs Linux, AVX2 and a C compiler")
    found = {}
    for heads, kv_heads, head_dim in (shape for shape in SHAPES if shape[1] % options.devices == 0):
        name = f"{heads} heads, {kv_heads} KV heads of {head_dim}"
        found[name] = measure((heads, kv_heads, head_dim), options)
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()))
    print(json.dumps({**vars(options), "forms": found}))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
