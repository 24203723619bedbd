"""The reason for a compiler option on tpu7x: a product in a loop over stacked weights, with and without the option.

If the first two cases fail, the compiler no longer copies the weights, and the option can be removed.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from orca_jax.exec.compile import compiler_options
from orca_jax.values.platforms import platform_named
from tests.aot.compilers import skip_without
from tests.aot.tpu import mesh_of

skip_without("libtpu")

pytestmark = [pytest.mark.aot, pytest.mark.slow]

WEIGHTS = jax.ShapeDtypeStruct((8, 4096, 4096), jnp.bfloat16)  # more than VMEM holds
TILES = Layout((0, 1, 2), ((16, 128), (2, 1)))  # the ones preferred by the compiler


def temporary(layout: Layout | None, options: Mapping[str, bool]) -> int:
    """Bytes for eight products, besides arguments and result."""
    here = NamedSharding(mesh_of("tpu7x", 1), PartitionSpec())

    def multiply(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.matmul(x.astype(jnp.bfloat16), weight, preferred_element_type=jnp.float32), None

    weights = here if layout is None else Format(layout, here)
    program = jax.jit(
        lambda x, weights: jax.lax.scan(multiply, x, weights)[0], in_shardings=(here, weights)
    )
    lowered = program.lower(jax.ShapeDtypeStruct((64, 4096), jnp.float32), WEIGHTS)
    memory = lowered.compile(compiler_options=dict(options)).memory_analysis()
    assert memory is not None
    return int(memory.temp_size_in_bytes)


@pytest.mark.parametrize("layout", [None, Layout.AUTO], ids=["default", "chosen by the compiler"])
def test_all_weights_are_copied(layout: Layout | None) -> None:
    assert temporary(layout, {}) >= WEIGHTS.size * 2


def test_they_are_not_copied_from_its_own_tiles() -> None:
    assert temporary(TILES, {}) < 1 << 20


def test_they_are_not_copied_with_the_option() -> None:
    assert temporary(None, compiler_options(platform_named("tpu"), "TPU7x")) < 1 << 20
