"""The leader's thread for everything but plans: new processes, heartbeats, digests, and the end of the cluster."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.keys import ClusterKeys
from orca_jax.cluster.messages import (
    ClusterMessage,
    Hello,
    InvalidMessageError,
    LeaderBeat,
    Refused,
    Report,
    Stop,
    ToLeader,
    WorkerBeat,
    WorkerFailed,
    decode_to_leader,
    encode,
)
from orca_jax.cluster.roll import Roll
from orca_jax.cluster.sockets import Change, ConnectionMonitor, Gatekeeper, bind, leader_socket
from orca_jax.cluster.watch import WorkerWatch

BEAT_SECONDS = 0.5
TICK_SECONDS = 0.25
TICK_MS = 250

Lost = Callable[[str, int], None]
"""Called in the control thread, once, with the reason and the exit status for this process."""

logger = logging.getLogger(__name__)


class ControlThread:
    """Owns the control socket. The main thread makes it, and uses the methods up to `close`.

    Args:
        context: the context of the sockets of this process.
        ip, port: to listen on.
        keys: the keys of the cluster.
        roll: the list of the processes that have joined.
        lost: called if a worker is lost, stuck or diverged, or has failed.

    Attributes:
        received: messages for the main thread, with the ranks of their senders; None after a loss.
        watch: set by the main thread, when it welcomes the workers.
        failure: the reason of a loss.
        has_ended: set after a loss, and by `close`.

    Raises:
        ConfigError: the address is wrong.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        ip: str,
        port: int,
        keys: ClusterKeys,
        roll: Roll,
        lost: Lost,
    ) -> None:
        self.received: queue.SimpleQueue[tuple[int, ToLeader] | None] = queue.SimpleQueue()
        self.watch: WorkerWatch | None = None
        self.failure: str | None = None
        self.has_ended = threading.Event()
        self._roll = roll
        self._lost = lost
        self._gate = Gatekeeper(context, keys)
        self._control = leader_socket(context, keys)
        bind(self._control, ip, port)
        self._monitor = ConnectionMonitor(self._control)
        self._wake = context.socket(zmq.PAIR)
        self._woken = context.socket(zmq.PAIR)
        self._woken.bind("inproc://to-control")
        self._wake.connect("inproc://to-control")
        # None: to all
        self._outgoing: queue.SimpleQueue[tuple[int | None, ClusterMessage]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="cluster")
        self._thread.start()

    def send(self, rank: int | None, message: ClusterMessage) -> None:
        """Send a message to a worker, or to all."""
        self._outgoing.put((rank, message))
        self._wake.send(b"")

    def close(self, timeout: float) -> bool:
        """Send what is left, and end the thread. False: it still runs, since it ends the process.

        After a loss this waits too: the last messages to the workers may not have left this process yet.
        """
        if not self.has_ended.is_set():
            self._wake.send(b"end")
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Watch until the end; all methods below belong to the thread."""
        try:
            self._serve()
        except BaseException as error:  # a thread must not end in silence
            logger.exception("the control thread failed")
            self._fail(f"the control thread failed: {type(error).__name__}")

    def _serve(self) -> None:
        poller = zmq.Poller()
        for each in (self._control, self._monitor.socket, self._woken, self._gate.socket):
            poller.register(each, zmq.POLLIN)
        last = time.monotonic()
        next_beat = 0.0
        is_over = False
        while not is_over:
            ready = dict(poller.poll(TICK_MS))
            if self._gate.socket in ready:
                self._gate.answer()
            if self._woken in ready:
                is_over = self._woken.recv() == b"end"
            self._send_outgoing()
            # before the messages: the last one came before the end
            changes = list(self._monitor.changes())
            while self._control.poll(0):
                self._take(*self._control.recv_multipart(copy=False)[:2])
            self._note(changes)
            now = time.monotonic()
            # If this process was stopped or starved itself, messages may be waiting unread.
            passed = min(now - last, 2 * TICK_SECONDS)
            last = now
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._send_to(None, LeaderBeat())
            if self.watch is not None and (reason := self.watch.verdict(passed)) is not None:
                self._fail(reason)
            is_over = is_over or self.failure is not None
        self._monitor.close()
        for each in (self._control, self._woken):
            each.close()
        self.has_ended.set()

    def _send_outgoing(self) -> None:
        while not self._outgoing.empty():
            self._send_to(*self._outgoing.get())

    def _send_to(self, rank: int | None, message: ClusterMessage) -> None:
        payload = encode(message)
        for identity in self._roll.identities() if rank is None else [self._roll.identity(rank)]:
            # it has gone; the monitor or its silence shows it
            with contextlib.suppress(zmq.ZMQError):
                self._control.send_multipart((identity, payload), zmq.NOBLOCK)

    def _take(self, identity: zmq.Frame, payload: zmq.Frame) -> None:
        sender = identity.bytes
        descriptor = payload.get(zmq.SRCFD)
        try:
            message = decode_to_leader(payload.bytes)
        except InvalidMessageError:
            rank = self._roll.rank_of(sender)
            if rank is None:  # before the first valid message the sender may be of another version
                self._refuse(
                    sender, "its messages cannot be read; install the same version on all hosts"
                )
            else:
                self._fail(f"{self._roll.name(rank)} sent an invalid message")
            return
        if isinstance(message, Hello):
            refusal = self._roll.join(sender, descriptor, message)
            if refusal is not None:
                self._refuse(sender, refusal.reason, refusal.param)
            return
        rank = self._roll.rank_of(sender)
        if rank is None or self.watch is None:
            return  # refused, or gone
        self.watch.hear(rank)
        match message:
            case WorkerBeat():
                self.watch.take_beat(rank, message)
            case Report():
                self.watch.take_report(rank, message)
            case WorkerFailed(reason, param=param, is_config=is_config):
                flag = f"--{param.replace('_', '-')}: " if is_config and param else ""
                self._fail(
                    f"{self._roll.name(rank)} failed: {flag}{reason}",
                    ExitStatus.CONFIG if is_config else ExitStatus.CLUSTER_LOST,
                )
            case _:
                self.received.put((rank, message))

    def _refuse(self, sender: bytes, reason: str, param: str | None = None) -> None:
        logger.warning("refused a process: %s", reason)
        with contextlib.suppress(zmq.ZMQError):  # it has gone
            self._control.send_multipart((sender, encode(Refused(reason, param))), zmq.NOBLOCK)

    def _note(self, changes: Iterable[tuple[Change, int]]) -> None:
        for change, descriptor in changes:
            if change in (Change.WRONG_KEY, Change.NO_KEY):
                logger.warning("refused a connection: it has a wrong cluster key, or none")
            rank = self._roll.leave(descriptor) if change is Change.LOST else None
            if rank is not None:
                self._fail(
                    f"{self._roll.name(rank)} closed its connection: it was killed or has ended"
                )

    def _fail(self, reason: str, status: ExitStatus = ExitStatus.CLUSTER_LOST) -> None:
        """End the cluster; only the first reason counts."""
        if self.failure is not None:
            return
        self.failure = reason
        logger.error("the cluster is lost: %s", reason)
        self._send_to(None, Stop(status, reason))
        self.received.put(None)
        self.has_ended.set()
        self._lost(reason, status)
