"""Fixtures: one server shared by tests that leave it idle."""

import logging
from collections.abc import Iterator

import pytest

from tests.serve.running import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running("--max-num-seqs", "8", "--max-model-len", "8192") as started:
        yield started


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """`main` in this process replaces the handlers of the root logger; the next test gets its own back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
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
