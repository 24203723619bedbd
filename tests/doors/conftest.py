"""Few programs for commands in this process, and the shared server of tests/serve for those that call one."""

import pytest

from tests.serve.conftest import process_as_before, server

__all__ = ["process_as_before", "server"]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines choose one device of the CPU: its programs compile in less time."""
    monkeypatch.setattr("orca_jax.exec.host.num_processors", lambda: 1)
