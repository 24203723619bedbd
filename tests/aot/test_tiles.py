"""Why tpu7x's compiler is given an option: a product in a loop over stacked weights, with and without it.

Where the first two cases fail, that compiler reads weights as they lie by itself, and the option can go.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from orca_jax.exec.compile import compiler_options
from tests.aot.compilers import skip_without
from tests.aot.tpu import mesh_of

skip_without("libtpu")

pytestmark = [pytest.mark.aot, pytest.mark.slow]

WEIGHTS = jax.ShapeDtypeStruct((8, 4096, 4096), jnp.bfloat16)  # more than VMEM holds
TILES = Layout((0, 1, 2), ((16, 128), (2, 1)))  # the compiler's own


def temporary(layout: Layout | None, options: Mapping[str, bool]) -> int:
    """Bytes that eight products need beside arguments and result."""
    here = NamedSharding(mesh_of("tpu7x", 1), PartitionSpec())

    def multiply(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.matmul(x.astype(jnp.bfloat16), weight, preferred_element_type=jnp.float32), None

    weights = here if layout is None else Format(layout, here)
    program = jax.jit(lambda x, weights: jax.lax.scan(multiply, x, weights)[0], in_shardings=(here, weights))
    lowered = program.lower(jax.ShapeDtypeStruct((64, 4096), jnp.float32), WEIGHTS)
    memory = lowered.compile(compiler_options=dict(options)).memory_analysis()
    assert memory is not None
    return int(memory.temp_size_in_bytes)


@pytest.mark.parametrize("layout", [None, Layout.AUTO], ids=["as they come", "as the compiler likes"])
def test_all_weights_are_copied(layout: Layout | None) -> None:
    assert temporary(layout, {}) >= WEIGHTS.size * 2


def test_they_are_not_copied_from_its_own_tiles() -> None:
    assert temporary(TILES, {}) < 1 << 20


def test_they_are_not_copied_with_the_option() -> None:
    assert temporary(None, compiler_options("TPU7x")) < 1 << 20
