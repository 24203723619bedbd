"""Pallas' strict interpreter for TPUs: asynchronous transfers, memory initialised with NaN, and detection of races."""

from collections.abc import Iterator
from contextlib import contextmanager

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def strictly() -> Iterator[pltpu.InterpretParams]:
    """Yield parameters for the interpreter. At least one kernel must run inside, and no race may be found."""
    try:
        yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
        assert interpret_pallas_call.races is not None
        assert not interpret_pallas_call.races.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
