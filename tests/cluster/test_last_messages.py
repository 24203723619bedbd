"""The leader's last message reaches the workers, and counts more than the end of the connection."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from orca_jax.cluster.control import ControlThread
from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.keys import ClusterKeys, make_key_file, read_keys
from orca_jax.cluster.launch import free_ports
from orca_jax.cluster.messages import Refused, Stop, Welcome, WorkerBeat, decode_to_worker, encode
from orca_jax.cluster.roll import Roll
from orca_jax.cluster.sockets import Change, Gatekeeper, leader_socket, worker_socket
from orca_jax.cluster.watch import WorkerWatch
from orca_jax.cluster.worker_link import WorkerLink
from orca_jax.values.startup import ClusterConfig
from tests.cluster.test_messages import hello

WAIT = 60.0  # seconds


def test_the_end_after_a_loss_waits_for_the_last_messages() -> None:
    """Without the wait the main thread ends the process while they are in the queues of ZeroMQ."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    are_sent = threading.Event()
    control = ControlThread(
        context,
        "127.0.0.1",
        free_ports(),
        new_keys(),
        Roll(2, has_devices=False),
        lambda *_: are_sent.wait(WAIT),
    )
    watch = WorkerWatch(["worker 1"], 0.1)
    watch.serves()
    control.watch = watch  # worker 1 is silent
    assert control.has_ended.wait(WAIT)
    closer = threading.Thread(target=control.close, args=(WAIT,))
    closer.start()
    closer.join(0.3)
    assert closer.is_alive()
    are_sent.set()
    closer.join(WAIT)
    assert not closer.is_alive() and not control._thread.is_alive()
    context.destroy(linger=0)


class OneWorker:
    """A leader's socket, and the link of a worker that it has welcomed."""

    def __init__(self, folder: Path) -> None:
        make_key_file(folder / "key")
        keys = read_keys(folder / "key")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate = Gatekeeper(self.context, keys)
        self.leader = leader_socket(self.context, keys)
        port = self.leader.bind_to_random_port("tcp://127.0.0.1")
        self.ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        config = ClusterConfig(3, 1, master_port=port, cluster_key_file=str(folder / "key"))
        beat = WorkerBeat(0, 0, 0.0, 0.0, "")
        self.link = WorkerLink(config, hello(), lambda: beat, lambda *end: self.ends.put(end))
        joining = threading.Thread(target=self.link.join)
        joining.start()
        gate.answer()
        self.worker, _ = self.leader.recv_multipart()
        self.send(encode(Welcome(b"plans", None)))
        joining.join(WAIT)
        gate.socket.close()

    def send(self, payload: bytes) -> None:
        """Send bytes to the worker."""
        self.leader.send_multipart((self.worker, payload))

    def close(self) -> None:
        """Close all sockets, after the end of the link's thread."""
        self.link._thread.join(WAIT)
        self.link._context.destroy(linger=0)
        self.context.destroy(linger=0)


def new_keys() -> ClusterKeys:
    leader, worker = (zmq.curve_keypair()[1] for _ in range(2))
    return ClusterKeys(leader, worker)


@pytest.mark.parametrize(
    "payload", [b"\x92\xa4Stop\xa2\xff\xf1", b"\x93\xa4Stop\x00\xa2\xff\xf1", b"\xc1"]
)
def test_a_message_that_cannot_be_read_ends_the_worker_as_a_loss_of_the_leader(
    tmp_path: Path, payload: bytes
) -> None:
    one = OneWorker(tmp_path)
    one.send(payload)
    assert one.ends.get(timeout=WAIT) == (
        "the leader sent an invalid message",
        ExitStatus.LEADER_LOST,
    )
    one.close()


@pytest.mark.parametrize(
    "payload", [b"\x92\xa5Hello\xa2\xff\xf1", b"\x94\xacWorkerFailed\xa2\xff\xf1\xc0\xc2", b"\xc1"]
)
def test_a_message_that_cannot_be_read_ends_the_cluster_by_its_sender(payload: bytes) -> None:
    """Before its first valid message a process is refused, and the others go on."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys, port, ends = new_keys(), free_ports(), queue.SimpleQueue[tuple[str, int]]()
    roll = Roll(2, has_devices=True)
    control = ControlThread(context, "127.0.0.1", port, keys, roll, lambda *end: ends.put(end))
    stranger, worker = (worker_socket(context, keys) for _ in range(2))
    for socket in (stranger, worker):
        socket.connect(f"tcp://127.0.0.1:{port}")
    stranger.send(payload)
    assert stranger.poll(1000 * WAIT) and decode_to_worker(stranger.recv()) == Refused(
        "its messages cannot be read; install the same version on all hosts"
    )
    worker.send(encode(hello(nnodes=2)))
    assert roll.changed.wait(WAIT) and control.failure is None
    worker.send(payload)
    assert ends.get(timeout=WAIT) == (
        "worker 1 (h, process 7) sent an invalid message",
        ExitStatus.CLUSTER_LOST,
    )
    control.close(WAIT)
    context.destroy(linger=0)


def test_a_message_counts_more_than_the_end_of_the_connection_after_it(tmp_path: Path) -> None:
    one = OneWorker(tmp_path)
    link = one.link

    def stop_and_leave() -> Iterator[tuple[Change, int]]:
        """Both while the worker looks for changes."""
        one.send(encode(Stop(ExitStatus.CLUSTER_LOST, "worker 2 was killed")))
        assert link._control.poll(1000 * WAIT), "the message has not arrived"
        yield Change.LOST, 0

    link._monitor.changes = stop_and_leave
    assert one.ends.get(timeout=WAIT) == ("worker 2 was killed", ExitStatus.CLUSTER_LOST)
    one.close()
