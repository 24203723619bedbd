"""Few programs for commands in this process, which then is as before."""

import pytest

from tests.serve.conftest import process_as_before

__all__ = ["process_as_before"]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines choose one device of the CPU: its programs compile in less time."""
    monkeypatch.setattr("orca_jax.exec.host.num_processors", lambda: 1)
