"""Measures the products of GPT-2's layers and unembedding on this CPU: XLA against the library in C.

    python -m lab.measured.products [--dtype bfloat16] [--rows 8 32 128 512] [--repeats 15] [--avx2]

Runs both in alternation on a device for each of two processors, and prints the median milliseconds of each, with the
sums over devices and the activations between the products. `--avx2` stands for a processor without AVX-512: both use
AVX2 alone. The last line is JSON.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.kernels.matmul import matmul
from orca_jax.kernels.native import compiler, load_library, pack, packed_product

LAYERS = 12
DEVICES = 2
VOCABULARY = 50432
# queries, keys and values; out; up; down
SHAPES = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
SPLIT_OUTPUTS = (True, False, True, False)
EVERYWHERE = PartitionSpec()

Product = Callable[[jax.Array, jax.Array], jax.Array]


def xla_table(x: jax.Array, table: jax.Array) -> jax.Array:
    """The product of XLA with a table, in the faster order of each type."""
    if table.dtype == jnp.float32:
        return matmul(x, table.T)
    last_axes = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        table, x.astype(table.dtype), last_axes, preferred_element_type=jnp.float32
    ).T


def layers(multiply: Product, x: jax.Array, matrices: Sequence[jax.Array]) -> jax.Array:
    """The products of all layers, with sums over devices as in a launch, and without attention."""
    for index in range(0, len(matrices), len(SHAPES)):
        first, out, up, down = matrices[index : index + len(SHAPES)]
        part = multiply(x, first)[:, : x.shape[1] // DEVICES]
        x = x + jax.lax.psum(multiply(part, out), "tensor")
        x = x + jax.lax.psum(multiply(jax.nn.gelu(multiply(x, up)), down), "tensor")
    return x


class Weights:
    """The matrices of all layers and a table, plain and packed, on the devices of a mesh."""

    def __init__(self, dtype: str, width: int) -> None:
        self.mesh = Mesh(np.array(jax.devices()), ("tensor",))
        draw = np.random.default_rng(0)
        self.plain = list[jax.Array]()
        self.packed = list[jax.Array]()
        for _ in range(LAYERS):
            for shape, by_outputs in zip(SHAPES, SPLIT_OUTPUTS, strict=True):
                matrix = jnp.asarray(0.02 * draw.standard_normal(shape, np.float32), dtype)
                plain = (
                    PartitionSpec(None, "tensor") if by_outputs else PartitionSpec("tensor", None)
                )
                packed = PartitionSpec("tensor") if by_outputs else PartitionSpec(None, "tensor")
                self.plain.append(self._placed(matrix, plain))
                self.packed.append(self._placed(pack(matrix, width), packed))
        table = jnp.asarray(
            0.02 * draw.standard_normal((VOCABULARY, SHAPES[0][0]), np.float32), dtype
        )
        self.table = self._placed(table, PartitionSpec("tensor"))
        self.packed_table = self._placed(pack(table.T, width), PartitionSpec("tensor"))

    def _placed(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(array, NamedSharding(self.mesh, spec))

    def program(
        self, run: Callable[..., jax.Array], weights: Any, out: PartitionSpec
    ) -> Callable[..., jax.Array]:
        """A compiled program `(x, weights) -> out` on all devices."""
        specs = EVERYWHERE, jax.tree.map(lambda each: each.sharding.spec, weights)
        return jax.jit(
            jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)
        )


def measure(weights: Weights, rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds of the layers and the unembedding by both, medians, and their ratios."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, SHAPES[0][0]), np.float32))
    by_vocabulary = PartitionSpec(None, "tensor")
    forms: dict[str, tuple[Callable[..., jax.Array], Any, PartitionSpec]] = {
        "layers_xla": (partial(layers, matmul), weights.plain, EVERYWHERE),
        "layers_library": (
            partial(layers, partial(packed_product, devices=DEVICES)),
            weights.packed,
            EVERYWHERE,
        ),
        "unembedding_xla": (xla_table, weights.table, by_vocabulary),
        "unembedding_library": (
            partial(packed_product, devices=DEVICES),
            weights.packed_table,
            by_vocabulary,
        ),
    }
    runs = {
        name: partial(weights.program(run, given, out), x, given)
        for name, (run, given, out) in forms.items()
    }
    results = {name: np.asarray(run()) for name, run in runs.items()}
    for part in ("layers", "unembedding"):
        expected = results[f"{part}_xla"]
        np.testing.assert_allclose(
            results[f"{part}_library"], expected, atol=0.02 * np.abs(expected).max()
        )
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            taken[name].append(time.perf_counter() - start)
    found = {
        f"{name}_ms": round(1e3 * float(np.median(seconds)), 1) for name, seconds in taken.items()
    }
    for part in ("layers", "unembedding"):
        found[f"{part}_ratio"] = round(
            float(np.median(taken[f"{part}_xla"]) / np.median(taken[f"{part}_library"])), 2
        )
    return found


def use_avx2() -> None:
    """Let XLA and the library use AVX2 alone. Call it before the first use of a device."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX2"
    compiler.NATIVE = ("-march=x86-64-v3",)


def main() -> None:
    """Measure all numbers of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 32, 64, 128, 512])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--avx2", action="store_true")
    options = parser.parse_args()
    if options.avx2:
        use_avx2()
    library = load_library(None)
    if library is None:
        sys.exit("this machine has no library: it needs Linux, AVX2 and a C compiler")
    weights = Weights(options.dtype, library.width)
    found = {}
    for rows in options.rows:
        found[rows] = measure(weights, rows, options.repeats)
        print(
            f"{rows} rows: " + ", ".join(f"{key} {value}" for key, value in found[rows].items()),
            flush=True,
        )
    print(json.dumps({**vars(options), "products": found}))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    main()
