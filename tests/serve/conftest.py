"""One server for the tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.serve.running import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running("--max-num-seqs", "8", "--max-model-len", "8192") as started:
        yield started


@pytest.fixture
def idle_server(server: Server) -> Iterator[Server]:
    """The shared server, which must be without work before and after."""
    server.wait_idle()
    yield server
    server.wait_idle()


@pytest.fixture
def anyio_backend() -> str:
    """What `pytest.mark.anyio` runs tests on."""
    return "asyncio"
