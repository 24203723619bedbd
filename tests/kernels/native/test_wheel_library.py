"""The hook that adds the library in C to a wheel: the platform, the place in the wheel, and machines without it."""

from pathlib import Path
from typing import Any

import pytest

from orca_jax.kernels.native import compiler
from scripts import wheel_library
from scripts.wheel_library import LibraryHook
from tests.project.source import ROOT


class App:
    """The part of hatchling that shows warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


def hook_of(monkeypatch: pytest.MonkeyPatch, content: bytes, **functions: Any) -> LibraryHook:
    """A hook for Linux on x86-64 that compiles at once."""
    monkeypatch.setattr(wheel_library, "_is_platform", lambda: True)
    ready = {"found_compiler": lambda: "cc", "compiled": lambda *_: content} | functions
    monkeypatch.setattr(LibraryHook, "_compiler", lambda hook: vars(compiler) | ready)
    hook: Any = LibraryHook(str(ROOT), {}, None, None, "", "wheel", App())  # type: ignore[arg-type]
    return hook


def data_of(hook: LibraryHook, version: str = "standard") -> dict[str, Any]:
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize(version, data)
    return data


@pytest.mark.parametrize(
    ("content", "tag"),
    [
        (b"GLIBC_2.2.5 GLIBC_2.14", "manylinux_2_17_x86_64"),
        (b"GLIBC_2.9 GLIBC_2.34 GLIBC_2.14", "manylinux_2_34_x86_64"),
        (b"another C library", "linux_x86_64"),
    ],
)
def test_the_platform_is_that_of_the_symbols(
    content: bytes, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = hook_of(monkeypatch, content)
    data = data_of(hook)
    ((made, place),) = data["force_include"].items()
    assert (data["tag"], data["pure_python"]) == (f"py3-none-{tag}", False)
    assert (
        ROOT / place == compiler.wheel_file()
        and compiler.unsealed(Path(made).read_bytes()) == content
    )
    hook.finalize("standard", data, "")
    assert not Path(made).parent.exists()
    assert hook.dependencies() == ["jaxlib>=0.11.2"]


def test_an_editable_installation_compiles_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_of(hook_of(monkeypatch, b""), "editable") == {"force_include": {}}


def test_a_wheel_of_another_platform_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = hook_of(monkeypatch, b"")
    monkeypatch.setattr(wheel_library, "_is_platform", lambda: False)
    assert data_of(hook) == {"force_include": {}} and not hook.dependencies()


def test_a_machine_that_cannot_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError("the disk is full")

    cases = {
        "has no C compiler": {"found_compiler": lambda: None},
        "the disk is full": {"compiled": fail},
    }
    for reason, functions in cases.items():
        hook = hook_of(monkeypatch, b"", **functions)
        assert data_of(hook) == {"force_include": {}}
        (warning,) = hook.app.warnings
        assert warning.startswith("the wheel has no library in C: ") and warning.endswith(reason)
