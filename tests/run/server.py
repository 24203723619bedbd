"""Fixtures: one server of a worker, shared by all tests that leave it idle."""

from collections.abc import Iterator

import pytest

from tests.serve.running import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running("--max-num-seqs", "8", "--max-model-len", "8192") as started:
        yield started


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
