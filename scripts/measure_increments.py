"""Measures attention of increments on this CPU: sums over parts of a page against matrix products.

    python scripts/measure_increments.py [--dtype bfloat16] [--rows 32] [--context 300] [--repeats 9]

Runs the two forms in alternation, over 12 layers and on a device for each of two processors, and prints the median
milliseconds of each, and the rate at which the keys and values of all contexts are read. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.kernels.kv_pages import HeadMajorPages
from orca_jax.kernels.ragged_attention import xla

LAYERS, PAGE_SIZE = 12, 128
SHAPES = ((12, 12, 64), (8, 8, 128), (32, 8, 128), (8, 2, 128), (64, 8, 128))  # query heads, KV heads, head dim
DEVICES = 2
BY_HEAD = PartitionSpec(None, "heads")


def program(shape: tuple[int, int, int], rows: int, context: int, dtype: str) -> tuple[Callable[..., Any], list[Any]]:
    """All layers of one launch of increments, and its arguments. The contexts differ by up to a page."""
    heads, kv_heads, head_dim = shape
    draw, mesh = np.random.default_rng(0), Mesh(np.array(jax.devices()), ("heads",))
    per_row = -(-context // PAGE_SIZE)
    num_pages = rows * per_row
    place = partial(jax.device_put, device=NamedSharding(mesh, BY_HEAD))
    size = LAYERS * num_pages, kv_heads, head_dim, PAGE_SIZE
    pages = HeadMajorPages(*(place(jnp.asarray(draw.random(size, np.float32), dtype)) for _ in range(2)))
    queries = place(jnp.asarray(draw.random((rows, heads, head_dim), np.float32)))
    table = jnp.asarray(draw.permutation(num_pages).reshape(rows, per_row), jnp.int32)
    lengths = jnp.asarray(context - draw.integers(0, min(PAGE_SIZE, context), rows), jnp.int32)
    order, ones = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, jnp.int32)

    def layers(q: jax.Array, pages: HeadMajorPages, table: jax.Array, lengths: jax.Array) -> jax.Array:
        def layer(index: jax.Array, x: jax.Array) -> jax.Array:
            return xla.attend(x, pages, table + index * num_pages, order, ones, lengths, scale=head_dim**-0.5)

        return jax.lax.fori_loop(0, LAYERS, layer, q)

    everywhere = PartitionSpec()
    specs = BY_HEAD, HeadMajorPages(BY_HEAD, BY_HEAD), everywhere, everywhere  # type: ignore[arg-type]
    split = jax.shard_map(layers, mesh=mesh, in_specs=specs, out_specs=BY_HEAD, check_vma=False)
    return split, [queries, pages, table, lengths]


def seconds(run: Callable[..., Any], args: list[Any]) -> float:
    """The time of one run."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start


def measure(shape: tuple[int, int, int], options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of both forms, medians, and their ratio."""
    split, args = program(shape, options.rows, options.context, options.dtype)
    with patch.object(xla, "has_form", lambda *_: False):
        products = jax.jit(split).lower(*args).compile()
    with patch.object(xla, "has_form", lambda *_: True):
        sums = jax.jit(lambda *args: split(*args)).lower(*args).compile()
    np.testing.assert_allclose(np.asarray(sums(*args)), np.asarray(products(*args)), rtol=0.02, atol=0.02)
    taken = np.array([[seconds(form, args) for form in (products, sums)] for _ in range(options.repeats)])
    of_products, of_sums = np.median(taken, axis=0)
    num_bytes = 2 * LAYERS * shape[1] * shape[2] * jnp.dtype(options.dtype).itemsize * int(args[3].sum())
    return {
        "products_ms": round(1e3 * of_products, 1),
        "sums_ms": round(1e3 * of_sums, 1),
        "ratio": round(of_products / of_sums, 2),
        "sums_gb_per_s": round(num_bytes / of_sums / 1e9, 1),
    }


def main() -> None:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    found = {}
    for heads, kv_heads, head_dim in SHAPES:
        name = f"{heads} heads, {kv_heads} KV heads of {head_dim}"
        found[name] = measure((heads, kv_heads, head_dim), options)
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found[name].items()))
    print(json.dumps({**vars(options), "layers": LAYERS, "forms": found}))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
