"""The kernel of linear attention for TPUs, by Pallas' strict interpreter, against the oracle."""

from functools import partial

import jax
import numpy as np
import pytest

from orca_jax.kernels.linear_state import linear_state, tpu
from tests.kernels.states.test_triton import Load, make
from tests.kernels.strictly import strictly

pytestmark = pytest.mark.usefixtures("quick_compiles")

ALLOWED = 2e-5  # difference from the oracle
LOADS = {
    "single tokens": Load((1, 1, 1, 5), heads=16, values=128),
    "added values": Load((1, 1), heads=16, values=128, has_beta=False),
    "no single token": Load((3,), heads=16, values=128),
}


@pytest.mark.parametrize("name", LOADS)
def test_against_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = make(LOADS[name])
    monkeypatch.setattr(tpu, "_BLOCK_BYTES", 8 * 16 * 128 * 4)  # two blocks of 8 heads
    launch = tpu._launch.__wrapped__
    with strictly() as strict:
        monkeypatch.setattr(tpu, "_launch", lambda *given, interpret: launch(*given, strict))
        found = jax.jit(partial(linear_state, implementation="tpu"))(*given)
        jax.block_until_ready(found)
    wanted = jax.jit(partial(linear_state, implementation="reference"))(*given)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=ALLOWED, atol=ALLOWED)
