"""The share of a card's memory: of the whole card, not of the part that JAX takes by default."""

import os
import subprocess
import sys
from unittest.mock import Mock

import jax
import pytest

from orca_jax.errors import ConfigError
from orca_jax.exec import memory
from orca_jax.exec.cache import free_memory
from orca_jax.exec.memory import claim_memory, usable_bytes

CARD = 100_000
NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a share; restored at the end."""
    for name in (NEW, OLD):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variable", "taken", "utilization", "expected"),
    [
        (None, 0.75, 0.9, 0.75),  # JAX had started before
        (None, 0.75, 0.5, 0.5),
        (NEW, 0.9, 0.9, 0.9),
        (NEW, 0.5, 0.9, 0.5),
        (OLD, 0.6, 0.3, 0.3),
    ],
)
def test_utilization_is_a_share_of_the_whole_gpu(
    variable: str | None, taken: float, utilization: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, str(taken))
    stats = {"bytes_limit": int(CARD * taken), "bytes_in_use": 1000}
    assert usable_bytes(stats, "gpu", utilization) == pytest.approx(expected * CARD, abs=2)
    device = Mock(jax.Device, platform="gpu", memory_stats=lambda: stats)
    assert free_memory([device], utilization, 2000) == pytest.approx(expected * CARD - 3000, abs=2)


def test_a_tpu_reports_all_of_its_memory() -> None:
    assert usable_bytes({"bytes_limit": CARD}, "tpu", 0.9) == 90_000


@pytest.mark.parametrize("stats", [None, {"bytes_in_use": 5}], ids=["none", "no limit"])
def test_a_device_of_unknown_size_needs_num_pages(stats: dict[str, int] | None) -> None:
    with pytest.raises(ConfigError, match="set num_pages"):
        usable_bytes(stats, "gpu", 0.9)


def test_a_share_set_by_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "has_jax_started", lambda: False)
    claim_memory(0.8)
    assert os.environ[NEW] == "0.8"
    monkeypatch.delenv(NEW)
    monkeypatch.setenv(OLD, "0.4")
    claim_memory(0.8)
    assert NEW not in os.environ, "JAX refuses to start with both"


def test_no_share_is_set_after_jax_has_started() -> None:
    jax.devices()
    before = jax.config.jax_num_cpu_devices
    claim_memory(0.8)
    assert NEW not in os.environ, "the share that JAX took is another"
    assert jax.config.jax_num_cpu_devices == before


def test_the_share_is_set_before_jax_starts() -> None:
    code = """
import os, jax
from orca_jax.build import engine
from orca_jax.config import EngineConfig

def stop(*args, **options):
    print(os.environ.get("XLA_CLIENT_MEM_FRACTION"))
    raise SystemExit

engine.check_platform = stop  # on a CPU, the next step refuses the setting
engine.build_engine(EngineConfig("demo", gpu_memory_utilization=0.7, progress=False))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "0.7\n", done.stderr
