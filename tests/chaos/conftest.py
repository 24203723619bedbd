"""Fixtures: a shared server under attack, and a watched stream during each attack. All tests are marked `chaos`."""

from collections.abc import Iterator

import pytest

from tests.chaos.world import Watch, wait_calm, watched
from tests.serve.running import Server, running


@pytest.hookimpl(tryfirst=True)  # before records are found, and before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/chaos/"):
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.slow)  # by default neither runs


@pytest.fixture(scope="session")
def attacked() -> Iterator[Server]:
    """A server with eight rows, shared by all tests: it must survive them."""
    with running(
        "--max-num-seqs",
        "8",
        "--max-model-len",
        "8192",
        "--read-timeout",
        "3",
        "--write-timeout",
        "3",
    ) as server:
        yield server
        wait_calm(server)


@pytest.fixture
def server(attacked: Server) -> Server:
    """The shared server, idle before the test."""
    wait_calm(attacked)
    return attacked


@pytest.fixture
def watch(server: Server) -> Iterator[Watch]:
    """A stream that must stay correct during the test; afterwards rows and pages must be as before."""
    with watched(server) as watch:
        yield watch
