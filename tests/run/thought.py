"""The level *thought*: tests that import no JAX and start no program of the package.

`scripts/test --thought` runs them, which takes a minute: it suits each save. A module that imports JAX is skipped.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

LEFT_OUT = frozenset(
    {"ATTACKS", "EngineReplica", "ServerStart", "hosts", "run_batch", "running", "subprocess"}
)
"""Names that modules import to start programs, or to count the steps of long inputs."""


class Thought(importlib.abc.MetaPathFinder):
    """A finder before all others, and a plugin of pytest, which leave out what is not thought."""

    def __init__(self) -> None:
        """Skip from now on, for the rest of this process."""
        assert "jax" not in sys.modules, "JAX is refused before its first import"
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Skip for JAX; leave other modules to other finders."""
        if fullname == "jax":
            pytest.skip("imports JAX", allow_module_level=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Forget a skipped module: pytest keeps what it holds so far, which others would import."""
        if report.skipped:
            sys.modules.pop(report.nodeid.removesuffix(".py").replace("/", "."), None)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect tests that take long although they import no JAX."""
        config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
        items[:] = [item for item in items if not is_left_out(item)]


def is_left_out(item: pytest.Item) -> bool:
    """True for a test of a module that imports a name of `LEFT_OUT`, and for one of the shared server."""
    assert isinstance(item, pytest.Function)
    return "server" in item.fixturenames or not LEFT_OUT.isdisjoint(vars(item.module))
