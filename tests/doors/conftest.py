"""Few programs for commands in this process, which then is as before."""

import logging
from collections.abc import Iterator
from functools import partial

import pytest

from orca_jax.tools.simulate import check_policy, guarded
from tests.serve.conftest import process_as_before

__all__ = ["process_as_before"]


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines choose one device of the CPU: its programs compile in less time."""
    monkeypatch.setattr("orca_jax.exec.host.num_processors", lambda: 1)


@pytest.fixture(autouse=True)
def models_checked_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check a policy on a model in this process, which has programs; on the toy alone in another one, as users do."""

    def checked(check: partial[str]) -> str:
        _, _, model, _, _ = check.args
        if model is None:
            return guarded.checked(check)
        return check(lambda *_: None)

    monkeypatch.setattr(check_policy, "checked", checked)
    loggers = [logging.getLogger(name) for name in ("orca_jax.policy", "orca_jax.sched.prefixes")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
