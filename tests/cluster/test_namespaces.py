"""The leader and a worker in network namespaces, connected by a cable that a test unplugs."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.keys import make_key_file
from tests.cluster.hosts import DEVICE_FLAGS, DEVICE_MODEL, Hosts, start_worker
from tests.cluster.test_failures import TIMEOUT, lose
from tests.serve.running import MODEL, running

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

ETC = Path("/etc/netns")
LEADER, WORKER = "10.213.77.1", "10.213.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@dataclass(frozen=True)
class Cable:
    """Two namespaces with an end of a cable in each."""

    leader: str
    worker: str

    def inside(self, namespace: str) -> list[str]:
        """The words in front of a command in a namespace."""
        return ["ip", "netns", "exec", namespace]

    def unplug(self) -> None:
        """Cut the worker off: nothing arrives, and nothing says so."""
        ip("-n", self.leader, "link", "set", "end", "down")


@pytest.fixture
def cable() -> Iterator[Cable]:
    names = [f"orca-{role}-{os.getpid()}" for role in ("leader", "worker")]
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "-n",
            names[0],
            "link",
            "add",
            "end",
            "type",
            "veth",
            "peer",
            "name",
            "end",
            "netns",
            names[1],
        )
        for name, address in zip(names, (LEADER, WORKER), strict=True):
            # Gloo listens on the address of the host's name. `ip netns exec` puts this file in the place of /etc/hosts.
            file = ETC / name / "hosts"
            file.parent.mkdir(parents=True)
            file.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "end")
            for device in ("lo", "end"):
                ip("-n", name, "link", "set", device, "up")
        yield Cable(*names)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    finally:
        if shutil.which("ip") is not None:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
                shutil.rmtree(ETC / name, ignore_errors=True)


@pytest.mark.parametrize("has_devices", [False, True], ids=["toy", "devices"])
def test_a_worker_that_is_cut_off(
    has_devices: bool, cable: Cable, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    key = tmp_path / "key"
    make_key_file(key)
    model = DEVICE_MODEL if has_devices else MODEL
    device_flags = (
        (*DEVICE_FLAGS, f"--compile-cache={request.getfixturevalue('cache')}")
        if has_devices
        else ()
    )
    shared = (
        *("--model", model, "--nnodes=2", f"--master-addr={LEADER}", f"--cluster-key-file={key}"),
        *(f"--control-timeout={TIMEOUT}", *device_flags),
    )
    fields = {"model": model, "max_tokens": 1000 if has_devices else 15000}
    worker = start_worker(*shared, "--node-rank=1", prefix=cable.inside(cable.worker))
    with (
        worker,
        running(
            *shared, uds=tmp_path / "http", model=model, prefix=cable.inside(cable.leader)
        ) as server,
    ):
        hosts = Hosts(server, [worker], shared)
        assert server.complete("hi", **{**fields, "max_tokens": 4}).status_code == 200
        start = time.monotonic()
        lose(hosts, cable.unplug, **fields)
        assert hosts.leader_status() == ExitStatus.CLUSTER_LOST
        assert hosts.statuses() == [ExitStatus.LEADER_LOST]
        assert time.monotonic() - start < 15
    assert any("has sent nothing for 2 s" in line for line in server.errors)
