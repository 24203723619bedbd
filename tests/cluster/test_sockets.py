"""The leader listens on one address, and names the setting to change if it cannot."""

import socket
from pathlib import Path

import pytest

from orca_jax.cluster.keys import make_key_file
from orca_jax.cluster.launch import free_ports
from orca_jax.cluster.leader import Leader
from orca_jax.cluster.messages import WorkerBeat
from orca_jax.cluster.sockets import place, resolve
from orca_jax.cluster.worker_link import WorkerLink
from orca_jax.values.errors import ConfigError
from orca_jax.values.startup import ClusterConfig
from tests.cluster.test_messages import hello


def refusal(config: ClusterConfig) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        Leader(config, lambda reason, status: None, has_devices=False)
    return error.value


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    make_key_file(tmp_path / "key")
    return str(tmp_path / "key")


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "::1"])
def test_every_address_needs_keys(address: str) -> None:
    """Any user of a machine reaches its loopback addresses."""
    error = refusal(ClusterConfig(2, 0, master_addr=address))
    assert error.param == "nnodes" and "needs --cluster-key-file" in error.message
    assert "keygen" in error.message and "orca_jax.cluster launch" in error.message


def test_a_worker_needs_keys() -> None:
    """Without keys another user's process could be its leader."""
    with pytest.raises(ConfigError) as error:
        WorkerLink(
            ClusterConfig(2, 1), hello(), lambda: WorkerBeat(0, 0, 0.0, 0.0, ""), lambda *end: None
        )
    assert error.value.param == "nnodes" and "needs --cluster-key-file" in error.value.message


@pytest.mark.parametrize("offset", range(3))
def test_a_port_in_use_is_named(offset: int, key_file: str) -> None:
    first = free_ports()
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + offset))
        other.listen()
        error = refusal(ClusterConfig(2, 0, master_port=first, cluster_key_file=key_file))
    assert error.param == "master_port"
    assert f"127.0.0.1:{first + offset}" in error.message


def test_an_unknown_name_is_named(key_file: str) -> None:
    error = refusal(
        ClusterConfig(2, 0, master_addr="no.such.host.invalid", cluster_key_file=key_file)
    )
    assert error.param == "master_addr"


def test_addresses() -> None:
    assert resolve("127.0.0.1") == "127.0.0.1"
    assert (place("10.0.0.1", 5), place("::1", 5)) == ("10.0.0.1:5", "[::1]:5")
