"""Fixtures: one server shared by tests that leave it idle."""

import gc
import logging
from collections.abc import Iterator

import pytest

from tests.serve.running import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running("--max-num-seqs", "8", "--max-model-len", "8192") as started:
        yield started


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


@pytest.fixture
def idle_server(server: Server) -> Iterator[Server]:
    """The shared server, idle before and after the test."""
    server.wait_idle()
    yield server
    server.wait_idle()


@pytest.fixture
def anyio_backend() -> str:
    """The event loop for `pytest.mark.anyio`."""
    return "asyncio"
