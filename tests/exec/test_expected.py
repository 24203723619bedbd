"""Launches without requests, and their times."""

import numpy as np
import pytest

from orca_jax.exec.expected import LaunchTimes
from orca_jax.exec.pack import Layout
from orca_jax.exec.probe import probe
from orca_jax.values.cache_spec import LayerCache, PageShape, one_group
from orca_jax.values.config import CacheConfig, ExecutorConfig

ROWS, LENGTH = 4, 64
GROUPS = one_group([LayerCache(PageShape(2, 8))])


def probed(size: int, **changes: int) -> dict[str, np.ndarray]:
    settings = {"num_pages": 20, "length": LENGTH, **changes}
    cache = CacheConfig(GROUPS, (settings["num_pages"],), 8, "float32")
    config = ExecutorConfig("float32", 1, (size,), ROWS, settings["length"], cache)
    layout = Layout(size, ROWS, settings["length"] // 8)
    return layout.views(probe(layout, config))


def test_a_small_launch_has_a_token_of_each_request() -> None:
    view = probed(3)
    assert view["query_len"].tolist() == [1, 1, 1, 0] and view["query_start"].tolist() == [
        0,
        1,
        2,
        0,
    ]
    assert (
        view["context_len"].tolist() == [LENGTH] * 3 + [0]
        and view["positions"].tolist() == [LENGTH - 1] * 3
    )
    assert (view["token_row"] == ROWS).all(), "a token with a row would be written to the history"


def test_a_large_launch_has_a_part_of_a_prompt_too() -> None:
    view = probed(16)
    assert view["query_len"].tolist() == [1, 1, 1, 13] and view["query_start"].tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert view["context_len"].tolist() == [LENGTH] * 3 + [13]
    assert view["positions"].tolist() == [LENGTH - 1] * 3 + list(range(13))


def test_the_pages_exist_and_the_prompt_is_no_longer_than_a_context() -> None:
    view = probed(100, num_pages=5)
    assert view["query_len"][-1] == LENGTH and view["context_len"].max() == LENGTH
    assert view["page_table"].min() == 0 and view["page_table"].max() == 4


def test_the_shortest_time_of_a_launch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 10.0, 11.0, 20.0, 20.5, 30.0, 32.0])
    monkeypatch.setattr("orca_jax.exec.expected.time.perf_counter", lambda: next(clock))
    times = LaunchTimes()
    assert times.measure_layers(8, lambda: 7, 2) == 7
    times.measure_sampler(lambda: 0, is_plain=True)
    times.measure_sampler(lambda: 0, is_plain=False)
    assert times.usual() == {8: 1.5} and times.longest((8,), 2.0) == {8: 4.0}
    assert times.longest((8, 32), 2.0) == {8: 4.0, 32: 10.0}, (
        "four times the tokens, and one sampler"
    )
    kept = LaunchTimes.from_bytes(times.to_bytes())
    assert (
        kept is not None and kept.usual() == times.usual() and kept.longest((8,), 2.0) == {8: 4.0}
    )
    assert LaunchTimes.from_bytes(None) is None


@pytest.mark.parametrize(("now", "large"), [(1.7, 40.0), (9.0, 40.0), (0.5, 10.0)])
def test_times_of_a_busy_machine_shrink_with_the_smallest_launch(now: float, large: float) -> None:
    """A launch of one token took 2 s, and one of 64 took 40 s."""
    stored = LaunchTimes.from_bytes(b'{"layers": {"1": 2.0, "64": 40.0}, "samplers": [0, 0]}')
    found = LaunchTimes.from_bytes(f'{{"layers": {{"1": {now}}}, "samplers": [0, 0]}}'.encode())
    assert stored is not None and found is not None
    assert stored.as_now(found).of_layers(64) == large
