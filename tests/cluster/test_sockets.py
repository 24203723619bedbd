"""The leader listens on one address, and names the setting to change if it cannot."""

import socket

import pytest

from orca_jax.cluster.launch import free_ports
from orca_jax.cluster.leader import Leader
from orca_jax.cluster.sockets import is_loopback, place, resolve
from orca_jax.errors import ConfigError
from orca_jax.startup import ClusterConfig


def refusal(config: ClusterConfig) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        Leader(config, lambda reason, status: None, has_devices=False)
    return error.value


def test_an_open_address_needs_keys() -> None:
    error = refusal(ClusterConfig(2, 0, master_addr="0.0.0.0"))
    assert error.param == "cluster_key_file"
    assert "keygen" in error.message


@pytest.mark.parametrize("offset", range(3))
def test_a_port_in_use_is_named(offset: int) -> None:
    first = free_ports()
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + offset))
        other.listen()
        error = refusal(ClusterConfig(2, 0, master_port=first))
    assert error.param == "master_port"
    assert f"127.0.0.1:{first + offset}" in error.message


def test_an_unknown_name_is_named() -> None:
    error = refusal(ClusterConfig(2, 0, master_addr="no.such.host.invalid"))
    assert error.param == "master_addr"


def test_addresses() -> None:
    assert is_loopback(resolve("127.0.0.1")) and is_loopback("::1") and not is_loopback("10.0.0.1")
    assert (place("10.0.0.1", 5), place("::1", 5)) == ("10.0.0.1:5", "[::1]:5")
