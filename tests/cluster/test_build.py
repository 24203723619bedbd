"""Equal numbers of devices on all hosts, the leader's last, and memory for the least of them."""

from dataclasses import dataclass

import jax
import pytest

from orca_jax.assembly.choices import DeviceChoices
from orca_jax.assembly.cluster import _least_free
from orca_jax.assembly.devices import devices_each, mesh_devices
from orca_jax.assembly.support import Facts
from orca_jax.cluster.messages import HostDevices
from orca_jax.model.describe import read_model_config
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError

TWELVE_HEADS = read_model_config("preset:gpt2")


@pytest.mark.parametrize(
    ("tensor", "stages", "most", "nnodes", "expected"),
    [
        (None, 1, 1, 2, 1),
        (None, 1, 4, 2, 3),  # 6 of 8 devices share 12 heads
        (None, 1, 4, 3, 4),
        (None, 2, 4, 2, 4),  # 4 devices for each of two stages
        (None, 4, 4, 2, 4),  # 2 devices for each of four stages
        (None, 2, 1, 4, 1),  # two processes for each stage
        (6, 1, 8, 2, 3),
        (2, 2, 8, 2, 2),
    ],
)
def test_devices_of_each_process(
    tensor: int | None, stages: int, most: int, nnodes: int, expected: int
) -> None:
    config = EngineConfig(tensor_parallel_size=tensor, pipeline_parallel_size=stages)
    assert devices_each(Facts(config, nnodes, TWELVE_HEADS), most) == expected


@pytest.mark.parametrize(
    ("tensor", "nnodes", "hint"),
    [(3, 2, "multiple of the 2 processes"), (None, 5, "does not divide")],
)
def test_unequal_numbers_are_refused(tensor: int | None, nnodes: int, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as error:
        devices_each(Facts(EngineConfig(tensor_parallel_size=tensor), nnodes, TWELVE_HEADS), 8)
    assert error.value.param == "tensor_parallel_size"


@dataclass(frozen=True)
class Device:
    process_index: int
    id: int


def test_the_leaders_devices_are_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [Device(rank, number) for rank in range(3) for number in (1, 0)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    found = [(one.process_index, one.id) for one in mesh_devices(6, 3)]
    assert found == [(1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 1)]
    assert [one.process_index for one in mesh_devices(3, 3)] == [1, 2, 0]
    with pytest.raises(ConfigError, match="process 1 has 2"):
        mesh_devices(9, 3)


def test_the_least_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on one machine share its memory; a third machine has more."""
    monkeypatch.setattr(
        "orca_jax.assembly.cluster._own_devices", lambda wanted: HostDevices("cpu", 1000)
    )
    reports = [HostDevices("cpu", 1000), HostDevices("cpu", 5000)]
    assert _least_free(reports, [2, 2, 1], jax.devices(), DeviceChoices()) == 500
    assert _least_free(reports, [2, 2, 1], jax.devices(), DeviceChoices(needs_memory=False)) is None
