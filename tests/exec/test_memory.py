"""The share of a card's memory: of the whole card, not of the part that JAX takes by default."""

import os
import subprocess
import sys
from unittest.mock import Mock

import jax
import pytest

from orca_jax.exec import memory
from orca_jax.exec.cache import free_memory
from orca_jax.exec.memory import claim_memory, limit_threads, usable_bytes
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_named

pytestmark = pytest.mark.usefixtures("optimised")  # memory is that of programs of users

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
    variable: str | None,
    taken: float,
    utilization: float,
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, str(taken))
    stats = {"bytes_limit": int(CARD * taken), "bytes_in_use": 1000}
    assert usable_bytes(stats, platform_named("gpu"), utilization) == pytest.approx(
        expected * CARD, abs=2
    )
    device = Mock(jax.Device, platform="gpu", memory_stats=lambda: stats)
    assert free_memory([device], utilization, 2000) == pytest.approx(expected * CARD - 3000, abs=2)


def test_a_tpu_reports_all_of_its_memory() -> None:
    assert usable_bytes({"bytes_limit": CARD}, platform_named("tpu"), 0.9) == 90_000


@pytest.mark.parametrize("stats", [None, {"bytes_in_use": 5}], ids=["none", "no limit"])
def test_a_device_of_unknown_size_needs_num_pages(stats: dict[str, int] | None) -> None:
    with pytest.raises(ConfigError, match="set num_pages"):
        usable_bytes(stats, platform_named("gpu"), 0.9)


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
from orca_jax.assembly import engine
from orca_jax.values.config import EngineConfig

def stop(*args, **options):
    print(os.environ.get("XLA_CLIENT_MEM_FRACTION"))
    raise SystemExit

engine.dtype_of = stop
engine.build_engine(EngineConfig("demo", gpu_memory_utilization=0.7, kernel_self_test=False, progress=False))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "0.7\n", done.stderr


@pytest.mark.parametrize(
    ("given", "devices", "number"),
    [({}, 1, "3"), ({}, 8, "8"), ({"PJRT_NPROC": "5"}, 8, "5"), ({"NPROC": "6"}, 8, None)],
)
def test_xla_has_threads_for_the_processors(
    given: dict[str, str], devices: int, number: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(memory, "has_jax_started", lambda: False)
    monkeypatch.setattr(memory, "num_processors", lambda: 3)
    limit_threads(devices)
    assert os.environ.get("PJRT_NPROC") == number


THREADS = """
import os
from pathlib import Path
from orca_jax.assembly.devices import claim_devices
from orca_jax.assembly.support import Facts
from orca_jax.values.config import EngineConfig
from orca_jax.exec import host, memory
from orca_jax.model.describe import read_model_config

host.num_processors = memory.num_processors = lambda: 3  # of a control group
model = read_model_config("preset:gpt2-tiny", None)
claim_devices(Facts(EngineConfig("preset:gpt2-tiny"), model=model))
names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
print(names.count("tf_XLAEigen"), names.count("tf_XLAExecute"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads")
@pytest.mark.parametrize(
    ("given", "threads"), [({}, "3 3"), ({"PJRT_NPROC": "5"}, "5 5"), ({"NPROC": "7"}, "7 7")]
)
def test_the_pools_of_xla_have_these_threads(given: dict[str, str], threads: str) -> None:
    """By themselves they have one for each processor of the affinity."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_NPROC", "NPROC", "XLA_FLAGS")
    }
    run = subprocess.run(
        [sys.executable, "-c", THREADS],
        env=variables | given,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == threads


def test_the_number_of_threads_stays_once_jax_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setattr(os, "environ", {})
    limit_threads(8)
    assert not os.environ
