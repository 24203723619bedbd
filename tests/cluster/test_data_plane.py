"""The processes of a cluster beside the numbers that a TPU's runtime gives them, and rules of TPU slices."""

from dataclasses import replace

import jax
import pytest

from orca_jax.assembly.devices import devices_each
from orca_jax.assembly.support import WHOLE_SLICES, Facts
from orca_jax.cluster.data_plane import check_rank
from orca_jax.model.describe import read_model_config
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.startup import ClusterConfig

CHIPS = 4  # of a host


def test_ranks_are_those_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ClusterConfig(nnodes=8, node_rank=3, master_addr="127.0.0.1", master_port=29500)
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    check_rank(config)
    with pytest.raises(
        ConfigError, match="node_rank is 2, and the runtime of the devices calls this host 3"
    ) as error:
        check_rank(replace(config, node_rank=2))
    assert error.value.param == "node_rank"
    with pytest.raises(
        ConfigError, match="nnodes is 4, and the runtime of the devices has 8 hosts"
    ) as error:
        check_rank(replace(config, nnodes=4))
    assert error.value.param == "nnodes"


def facts(kind: str, num_hosts: int = 4, **settings: int) -> Facts:
    """Hosts of four chips, as they are known when the devices are open."""
    model = read_model_config("preset:gpt3-175b")
    return Facts(EngineConfig(**settings), num_hosts, model, device_kind=kind, num_devices=CHIPS)


@pytest.mark.parametrize("kind", WHOLE_SLICES)
def test_a_slice_without_parts_refuses_stages(kind: str) -> None:
    with pytest.raises(ConfigError, match="a stage has a part of them") as error:
        devices_each(facts(kind, pipeline_parallel_size=4), CHIPS)
    assert error.value.param == "pipeline_parallel_size" and kind in str(error.value)
    with pytest.raises(ConfigError, match="4 hosts with 4 chips each need their product") as error:
        devices_each(facts(kind, tensor_parallel_size=8), CHIPS)
    assert error.value.param == "tensor_parallel_size"
    assert devices_each(facts(kind, tensor_parallel_size=16), CHIPS) == CHIPS
    assert devices_each(facts(kind), CHIPS) == CHIPS


@pytest.mark.parametrize("kind", ["", "TPU v5", "NVIDIA H200"])
def test_other_devices_have_stages_on_several_hosts(kind: str) -> None:
    assert devices_each(facts(kind, pipeline_parallel_size=4), CHIPS) == CHIPS
