"""The state of the process, which a server in it changes."""

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """`main` in this process replaces the root logger's handlers and the thresholds of the garbage collector."""
    root = logging.getLogger()
    handlers, level, thresholds = root.handlers[:], root.level, gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
