"""Programs are dropped between tests before they take all memory maps of a process."""

import gc
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from tests.run import maps
from tests.run.maps import COMPILED, LOOK_AFTER, Maps


@pytest.mark.parametrize(
    ("most", "is_last", "is_dropped"),
    [(-1, True, True), (-1, False, False), (1_000_000, True, False)],
)
def test_programs_are_dropped_at_the_limit(
    most: int,
    is_last: bool,
    is_dropped: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The remembered ones at once, and those of JAX after the last test of a module.

    Programs of other tests stay, which would be compiled again, and their objects are not walked.
    """
    monkeypatch.setattr(maps, "MOST", most)
    monkeypatch.setattr(maps, "forget_programs", forgotten := Mock())
    monkeypatch.setattr(gc, "collect", collected := Mock())
    plugin = Maps()
    program = jax.jit(lambda x: x + 1)
    program(jnp.ones(3))
    monkeypatch.setattr(jax, "clear_caches", program.clear_cache)
    assert program._cache_size() == 1 and plugin.num_compiled > 0
    for _ in range(LOOK_AFTER):
        plugin._count(COMPILED, 0.1)
    plugin.pytest_runtest_teardown(request.node, None if is_last else request.node)
    assert plugin.num_compiled == 0
    assert forgotten.called == collected.called == (most < 0)
    assert program._cache_size() == (0 if is_dropped else 1)
    jax.monitoring.unregister_event_duration_listener(plugin._count)
