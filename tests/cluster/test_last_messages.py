"""The leader's last message reaches the workers, and counts more than the end of the connection."""

import queue
import threading
from collections.abc import Iterator

import zmq

from orca_jax.cluster.control import ControlThread
from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.launch import free_ports
from orca_jax.cluster.messages import Stop, Welcome, WorkerBeat, encode
from orca_jax.cluster.roll import Roll
from orca_jax.cluster.sockets import Change, leader_socket
from orca_jax.cluster.watch import WorkerWatch
from orca_jax.cluster.worker_link import WorkerLink
from orca_jax.startup import ClusterConfig
from tests.cluster.test_messages import hello

WAIT = 60.0  # seconds


def test_the_end_after_a_loss_waits_for_the_last_messages() -> None:
    """Without the wait the main thread ends the process while they are in the queues of ZeroMQ."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    are_sent = threading.Event()
    control = ControlThread(
        context, "127.0.0.1", free_ports(), None, Roll(2, has_devices=False), lambda *_: are_sent.wait(WAIT)
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


def test_a_message_counts_more_than_the_end_of_the_connection_after_it() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    leader = leader_socket(context, None)
    port = leader.bind_to_random_port("tcp://127.0.0.1")
    ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    config = ClusterConfig(3, 1, master_port=port)
    link = WorkerLink(config, hello(), lambda: WorkerBeat(0, 0, 0.0, 0.0, ""), lambda *end: ends.put(end))
    joining = threading.Thread(target=link.join)
    joining.start()
    worker, _ = leader.recv_multipart()
    leader.send_multipart((worker, encode(Welcome(b"plans", None))))
    joining.join(WAIT)

    def stop_and_leave() -> Iterator[tuple[Change, int]]:
        """Both while the worker looks for changes."""
        leader.send_multipart((worker, encode(Stop(ExitStatus.CLUSTER_LOST, "worker 2 was killed"))))
        assert link._control.poll(1000 * WAIT), "the message has not arrived"
        yield Change.LOST, 0

    link._monitor.changes = stop_and_leave
    assert ends.get(timeout=WAIT) == ("worker 2 was killed", ExitStatus.CLUSTER_LOST)
    link._thread.join(WAIT)
    link._context.destroy(linger=0)
    context.destroy(linger=0)
