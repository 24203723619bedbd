"""Programs are dropped between tests before they take all memory maps of a process."""

import jax
import jax.numpy as jnp
import pytest

from tests.run import maps
from tests.run.maps import COMPILED, LOOK_AFTER, Maps


@pytest.mark.parametrize(("most", "is_dropped"), [(-1, True), (1_000_000, False)])
def test_programs_are_dropped_at_the_limit(
    most: int, is_dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps, "MOST", most)
    plugin = Maps()
    program = jax.jit(lambda x: x + 1)
    program(jnp.ones(3))
    assert program._cache_size() == 1 and plugin.num_compiled > 0
    for _ in range(LOOK_AFTER):
        plugin._count(COMPILED, 0.1)
    plugin.pytest_runtest_teardown()
    assert plugin.num_compiled == 0
    assert program._cache_size() == (0 if is_dropped else 1)
    jax.monitoring.unregister_event_duration_listener(plugin._count)
