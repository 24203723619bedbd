"""The environment of the engine process."""

import pytest

from orca_jax.link.process_link import engine_variables


def test_huge_pages_unless_glibc_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    found = engine_variables()
    assert found["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1" and found["HF_HOME"] == "/models"
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    assert engine_variables()["GLIBC_TUNABLES"] == "glibc.malloc.check=1"
