"""Short convolutions for TPUs: those of XLA, on a pool that stays in HBM.

XLA takes a gather and a scatter for uses of the whole pool. One that fits into VMEM (128 MiB) it would copy there and
back in each round of the loop over layers: 1.2 GB of traffic in a step of Qwen3.5 9B with 128 states on two v5e.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from orca_jax.kernels.short_conv import xla
from orca_jax.kernels.state_rows import StateRows


def convolve(
    x: Float[Array, "T C"],
    kernel: Float[Array, "W C"],
    states: Float[Array, "N S"],
    rows: StateRows,
) -> tuple[Float[Array, "T C"], Float[Array, "N S"]]:
    """The sum over the taps, and the last inputs of each request; see `short_conv`."""
    pool = lax.platform_dependent(states, tpu=_kept_in_hbm, default=lambda same: same)
    return xla.convolve(x, kernel, pool, rows)


def _kept_in_hbm(states: Float[Array, "N S"]) -> Float[Array, "N S"]:
    """The same pool. A kernel without work takes it from HBM and leaves it there, and XLA heeds that."""
    place = pl.BlockSpec(memory_space=pltpu.HBM)
    run = pl.pallas_call(
        lambda before, after: None,
        in_specs=[place],
        out_specs=place,
        out_shape=jax.ShapeDtypeStruct(states.shape, states.dtype),
        input_output_aliases={0: 0},
        name="keep_in_hbm",
    )
    kept: Float[Array, "N S"] = run(pltpu.with_memory_space_constraint(states, pltpu.HBM))
    return kept
