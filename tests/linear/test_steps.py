"""Every reader of callers' bytes takes at most n log n: a small body must not stop a server for seconds."""

import math

import pytest

from tests.linear.counting import seconds_of, steps_of
from tests.linear.readers import READERS, Reader

SIZE = 200  # of the smallest input
GROWTH = 4
MARGIN = 1.5  # constant parts, and steps that saturate
MIN_STEPS = 2_000  # fewer are constant parts
LARGE = {"body": 1_000, "schema": 700, "answer": 4_000, "call": 2_000, "conversation": 4_000}
"""The size of the smallest input whose time is measured, by its kind."""
MOST_GROWTH = 9.0  # of the time for four times as much: 4 if it is linear, 16 if it is quadratic
MIN_SECONDS = 0.03  # shorter times say nothing


TIMED = [name for name in READERS if not name.startswith("call:") or name.endswith(" 0")]
"""All but most beginnings of calls, whose readers are the same."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in TIMED else pytest.mark.slow) for name in READERS],
)
def test_steps_grow_as_n_log_n(name: str) -> None:
    reader = READERS[name]
    reader(SIZE)()  # what is made once
    small = steps_of(reader(SIZE))
    large = steps_of(reader(GROWTH * SIZE))
    allowed = GROWTH * math.log(GROWTH * SIZE, SIZE) * MARGIN
    assert large <= max(MIN_STEPS, allowed * small)


@pytest.mark.parametrize("name", TIMED)
def test_time_of_libraries_grows_so_too(name: str) -> None:
    """Searches in texts and lists are one step each, however long they take."""
    reader = READERS[name]
    size = LARGE[name.partition(":")[0]]
    long = _seconds(reader, 4 * size, repeats=1)
    if long > MIN_SECONDS:
        allowed = max(MIN_SECONDS, MOST_GROWTH * _seconds(reader, size))
        assert long <= allowed or _seconds(reader, 4 * size) <= allowed


def _seconds(reader: Reader, size: int, repeats: int = 3) -> float:
    return seconds_of(lambda: reader(size), repeats)
