"""Memory maps of a process of tests: a program of XLA takes 200 to 250 of them on a CPU, and Linux allows 65,530.

XLA aborts at the limit, and the process with it.
"""

import gc
from pathlib import Path

import jax
import pytest

from tests.programs import forget_programs

COMPILED = "/jax/core/compile/backend_compile_duration"
LOOK_AFTER = 40  # compilations
MOST = 40_000  # maps


class Maps:
    """A plugin of pytest: between tests it drops compiled programs before they take too many maps."""

    def __init__(self) -> None:
        """Count compilations from now on."""
        self.num_compiled = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, seconds: float, **_: object) -> None:
        self.num_compiled += event == COMPILED

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Drop remembered programs, which take most maps. To count maps takes longer than a small test.

        JAX's own are dropped between modules alone: an engine of a module may not compile them again while it serves.
        """
        if self.num_compiled < LOOK_AFTER:
            return
        self.num_compiled = 0
        if num_maps() > MOST:
            forget_programs()
            if nextitem is None or nextitem.path != item.path:
                jax.clear_caches()
            gc.collect()


def num_maps() -> int:
    """Memory maps of this process; 0 where the system does not tell."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0
