"""Large pages of the system for arrays on a CPU; `test_untouched.py` tests `give_back`."""

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.exec.host_memory import use_large_pages

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def large_pages() -> int:
    """KiB of this process in large pages."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))


def wait(thread: threading.Thread | None) -> None:
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.skipif(not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="the system has no large pages")
def test_large_arrays_are_in_large_pages() -> None:
    wanted = np.arange(8 << 20, dtype=np.int32)
    large, small = jnp.asarray(wanted) + 1, jnp.ones(3)
    before = large_pages()
    wait(use_large_pages(jax.block_until_ready([small])))
    assert large_pages() == before
    wait(use_large_pages([large, small]))
    assert large_pages() >= 30 << 10  # of 32 MiB; parts at both ends may stay as they are
    np.testing.assert_array_equal(large, wanted + 1)
