"""Pallas' strict interpreter for TPUs: transfers run beside, memory starts as NaN, and races are looked out for."""

from collections.abc import Iterator
from contextlib import contextmanager

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def strictly() -> Iterator[pltpu.InterpretParams]:
    """How to interpret kernels within; there must be some, and no races in them."""
    try:
        yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        assert interpret_pallas_call.races is not None
        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
