"""The kernels of linear attention for TPUs, by Pallas' interpreters, against the oracle."""

from functools import partial

import jax
import numpy as np
import pytest

from orca_jax.kernels.linear_state import linear_state, tpu, tpu_chunks
from tests.kernels.states.test_triton import ALLOWED, Load, make
from tests.kernels.strictly import strictly

pytestmark = pytest.mark.usefixtures("quick_compiles")

WIDE = Load((1, 1, 1, 5), heads=16, values=128)  # single tokens by the kernel, in two blocks
QUICK = {
    "single tokens": WIDE,
    "ragged rows": Load((1, 1, 3, 9, 128, 131), heads=2, keys=128, values=128),
    "shared keys": Load((1, 1, 130), heads=4, keys=128, values=128, pairs=2),
}
SLOW = {
    "added values": Load((1, 1), heads=16, values=128, has_beta=False),
    "no single token": Load((3,), heads=16, values=128),
    "fewer tokens than a chunk": Load((1, 2, 40), heads=1, keys=128, values=128),
    "two blocks of heads": Load((1, 150), heads=16, keys=128, values=128),
    "added values of prompts": Load((1, 70, 129), 2, 128, 128, has_beta=False),
    "two blocks of shared keys": Load((1, 150), heads=32, keys=128, values=128, pairs=16),
    "keys of no whole tile": Load((1, 150), heads=24, keys=128, values=128, pairs=12),
    "keys of many heads": Load((1, 150), heads=64, keys=128, values=128, pairs=1),
    "256 keys": Load((1, 150), 2, 256, 128, has_beta=False),
}
ONE = (1, 150)
GATES = {
    "similar keys": Load(ONE, 2, 128, 128, likeness=0.99, gate=1 - 1e-6),
    "equal keys": Load(ONE, 2, 128, 128, likeness=1.0, gate=1.0),
    "gates near 0": Load(ONE, 2, 128, 128, gate=1e-30),
    "gates near 1": Load(ONE, 2, 128, 128, gate=1 - 1e-6),
}


def check(load: Load) -> None:
    """Compare results and states with the oracle's; NaN must be at the same places."""
    given = make(load)
    found = jax.jit(partial(linear_state, implementation="tpu"))(*given)
    wanted = jax.jit(partial(linear_state, implementation="reference"))(*given)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=ALLOWED, atol=ALLOWED)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_without_races(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "_BLOCK_BYTES", 8 * 16 * 128 * 4)  # two blocks of 8 heads
    with strictly() as strict:
        for module in (tpu, tpu_chunks):
            launch = module._launch.__wrapped__
            monkeypatch.setattr(
                module, "_launch", lambda *given, interpret, launch=launch: launch(*given, strict)
            )
        check((QUICK | SLOW)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_keys_and_gates(name: str) -> None:
    check(GATES[name])


def test_other_states_are_those_of_xla() -> None:
    assert tpu_chunks.takes(32, 128, 128)
    assert not tpu_chunks.takes(32, 96, 128)
    assert not tpu_chunks.takes(12, 128, 128)
