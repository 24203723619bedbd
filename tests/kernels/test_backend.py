"""The table of backends: the default of a device, and imports that wait until a backend is used."""

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from orca_jax.kernels.backend import Backend, first_backend, named_backend, refusals
from orca_jax.kernels.ragged_attention.api import BACKENDS

TABLE = (Backend("old", "m", "gpu", 7, 7), Backend("new", "m", "gpu", 8), Backend("any", "m"))


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("gpu", "7.5", ["old", "any"]),
        ("gpu", "8.0", ["new", "any"]),
        ("gpu", "12.1", ["new", "any"]),
        ("gpu", "gfx942", ["any"]),
        ("cpu", "", ["any"]),
    ],
)
def test_backends_meant_for_a_device(platform: str, capability: str, expected: list[str]) -> None:
    device = Mock(jax.Device, platform=platform, compute_capability=capability)
    assert [backend.name for backend in TABLE if backend.is_meant_for(device)] == expected


def test_a_refusal_leaves_the_choice_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "a": SimpleNamespace(refusal=lambda size: f"not {size}"),
        "b": SimpleNamespace(refusal=lambda size: None),
    }
    monkeypatch.setattr(Backend, "load", lambda backend: modules[backend.module])
    device = Mock(jax.Device, platform="cpu", compute_capability="")
    table = Backend("first", "a"), Backend("second", "b")
    assert first_backend(table, device, 3) == table[1]
    assert first_backend(table[:1], device, 3) is None
    assert refusals(table, device, 3) == ["not 3"]


def test_a_device_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        refusal=lambda size: None, refusal_of_device=lambda device: f"not on {device.device_kind}"
    )
    monkeypatch.setattr(Backend, "load", lambda backend: module)
    device = Mock(jax.Device, platform="cpu", compute_capability="", device_kind="abacus")
    assert Backend("first", "a").refusal(device, 3) == "not on abacus"
    assert first_backend((Backend("first", "a"),), device, 3) is None


def test_names() -> None:
    assert {backend.name for backend in BACKENDS} == {
        "reference",
        "xla",
        "native",
        "tpu",
        "tpu_latents",
        "gpu",
        "triton",
        "triton_latents",
        "gather",
    }
    assert named_backend(TABLE, "new") == TABLE[1]
    assert named_backend(TABLE, "fast") is None


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_functions_of_a_module(backend: Backend) -> None:
    module = backend.load()
    assert callable(module.refusal)
    assert callable(module.attend)
    assert hasattr(module, "write_and_attend") or not hasattr(module, "prepare")


def test_a_table_imports_no_kernel() -> None:
    code = "import sys, orca_jax.kernels.ragged_attention.api;print([name for name in sys.modules if 'pallas' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
