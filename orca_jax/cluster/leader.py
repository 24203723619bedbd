"""The leader: gathers the workers, sends them the calls of the executor, and watches them.

The main thread owns the plan socket and sends there without waiting. A thread of its own owns the control socket: it
answers new processes, sends and takes heartbeats, and ends the cluster if a worker is lost.
"""

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from orca_jax.cluster.digest import Digests
from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.keys import read_keys
from orca_jax.cluster.messages import (
    Call,
    ClusterMessage,
    DataPlane,
    Hello,
    LeaderBeat,
    Refused,
    Report,
    Stop,
    ToLeader,
    Welcome,
    WorkerBeat,
    WorkerFailed,
    decode_to_leader,
    encode,
)
from orca_jax.cluster.roll import Roll
from orca_jax.cluster.sockets import (
    Change,
    ConnectionMonitor,
    Gatekeeper,
    bind,
    is_loopback,
    leader_socket,
    place,
    resolve,
)
from orca_jax.cluster.watch import WorkerWatch
from orca_jax.config import ClusterConfig
from orca_jax.errors import ClusterLostError, ConfigError

BEAT_SECONDS = 0.5
TICK_SECONDS = 0.25
_TICK_MS = 250
_NEWS_SECONDS = 10.0  # between two lines of the log about missing workers
_EXPLAIN_SECONDS = 2.0  # for the watching thread to find the reason of a failure in the main thread

Lost = Callable[[str, int], None]
"""Called in the watching thread, once, with the reason and the exit status for this process."""

logger = logging.getLogger(__name__)


class Leader:
    """The leader's side of a cluster. Made and used by the main thread.

    Args:
        config: of the cluster.
        lost: called if a worker is lost, stuck or diverged, or has failed.
        has_devices: False for the toy.

    Raises:
        ConfigError: the address or the key file is wrong.
    """

    def __init__(self, config: ClusterConfig, lost: Lost, *, has_devices: bool) -> None:
        ip = resolve(config.master_addr)
        if config.cluster_key_file is None and not is_loopback(ip):
            message = (
                f"is needed to listen on {config.master_addr}; make one with: python -m orca_jax.cluster keygen FILE"
            )
            raise ConfigError(message, param="cluster_key_file")
        keys = None if config.cluster_key_file is None else read_keys(Path(config.cluster_key_file))
        self.config = config
        self.coordinator = place(config.master_addr, config.master_port + 2)  # the name, for its certificate
        self._lost = lost
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = None if keys is None else Gatekeeper(self._context, keys)
        self._control, self._plans = leader_socket(self._context, keys), leader_socket(self._context, keys)
        bind(self._control, ip, config.master_port)
        bind(self._plans, ip, config.master_port + 1)
        self._monitor = ConnectionMonitor(self._control)
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://to-watch")
        self._wake.connect("inproc://to-watch")
        self._roll = Roll(config.nnodes, has_devices=has_devices)
        self._received: queue.SimpleQueue[tuple[int, ToLeader] | None] = queue.SimpleQueue()  # None: a loss
        self._outgoing: queue.SimpleQueue[tuple[int | None, ClusterMessage]] = queue.SimpleQueue()  # None: to all
        self._identities: list[bytes] = []  # of the workers on the plan socket
        self._watch: WorkerWatch | None = None  # from the welcome on
        self._failure: str | None = None
        self._is_closed = False
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="cluster")
        self._thread.start()

    def gather(self) -> list[Hello]:
        """Wait for all workers; return what they have sent, by rank.

        Raises:
            ConfigError: they did not come in time.
        """
        deadline, news = time.monotonic() + self.config.join_timeout, time.monotonic() + _NEWS_SECONDS
        while (hellos := self._roll.close()) is None:
            missing = self._roll.missing()
            self._raise_if_lost()
            if missing and time.monotonic() > deadline:
                raise ConfigError(f"{_ranks(missing)} did not join in time", param="nnodes")
            if missing and time.monotonic() > news:
                news += _NEWS_SECONDS
                logger.info("waiting for %s to join", _ranks(missing))
            self._roll.changed.wait(TICK_SECONDS)
            self._roll.changed.clear()
        return hellos

    def welcome(self, hellos: list[Hello], data_plane: DataPlane | None) -> None:
        """Admit the workers, and watch them from now on."""
        self._identities = [b"plan" + secrets.token_bytes(12) for _ in hellos]
        names = [f"worker {hello.rank} ({hello.host}, process {hello.pid})" for hello in hellos]
        self._watch = WorkerWatch(names, self.config.control_timeout)
        for rank, identity in enumerate(self._identities, start=1):
            self._send(rank, Welcome(identity, data_plane))

    def send_all(self, message: ClusterMessage) -> None:
        """Send a message to all workers on the control socket."""
        self._send(None, message)

    def expect[M: ToLeader](self, kind: type[M]) -> list[M]:
        """Wait for a message of this kind from each worker; return them by rank."""
        found: dict[int, M] = {}
        while len(found) < self.config.nnodes - 1:
            received = self._received.get()
            if received is None:
                raise ClusterLostError(self._failure or "the cluster has ended")
            rank, message = received
            if not isinstance(message, kind):
                raise ClusterLostError(f"worker {rank} sent {type(message).__name__} instead of {kind.__name__}")
            found[rank] = message
        return [found[rank] for rank in sorted(found)]

    def expect_plan_sockets(self) -> None:
        """Wait until each worker listens to plans."""
        awaited = set(self._identities)
        while awaited:
            self._raise_if_lost()
            if self._plans.poll(_TICK_MS):
                awaited.discard(self._plans.recv_multipart()[0])

    def serve(self) -> None:
        """Use the limits of serving workers from now on."""
        assert self._watch is not None, "serve before welcome"
        self._watch.serves()

    def call(self, call: Call) -> bytes:
        """Send a call of the executor to all workers at once, without waiting; return its encoded form.

        Raises:
            ClusterLostError: a worker is not connected, or does not read.
        """
        assert self._watch is not None, "a call before welcome"
        payload = encode(call)
        for identity in self._identities:
            try:
                self._plans.send_multipart((identity, payload), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                self._fail_main(f"a worker does not take plans: {error}")
        return payload

    def sent(self, num_plans: int) -> None:
        """Note the number of plans sent so far."""
        assert self._watch is not None, "a plan before welcome"
        self._watch.num_sent = num_plans

    def compare(self, iteration: int, digests: Digests) -> None:
        """Compare the workers' digests after an iteration with the leader's, as soon as they come."""
        assert self._watch is not None, "an iteration before welcome"
        self._watch.own(iteration, digests)

    def explain(self, error: Exception) -> Exception:
        """The reason of an error of the executor: the loss of a worker, if there was one, or the error itself.

        The devices may notice a loss before the watching thread, so this waits for a moment.
        """
        self._has_ended.wait(_EXPLAIN_SECONDS)
        return error if self._failure is None else ClusterLostError(self._failure)

    def close(self, status: int = ExitStatus.DONE) -> None:
        """Make the workers end, and close the sockets. `status` is that of this process."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._has_ended.is_set():
            end = Stop(ExitStatus.LEADER_LOST, "the leader has failed")
            self._send(None, end if status else Stop(ExitStatus.DONE, "the leader has ended"))
            self._wake.send(b"end")
            self._thread.join(_EXPLAIN_SECONDS)
        for each in (self._wake, self._plans):
            each.close()

    def _send(self, rank: int | None, message: ClusterMessage) -> None:
        self._outgoing.put((rank, message))
        self._wake.send(b"")

    def _raise_if_lost(self) -> None:
        if self._failure is not None:
            raise ClusterLostError(self._failure)

    def _fail_main(self, reason: str) -> None:
        raise self.explain(ClusterLostError(reason))

    def _run(self) -> None:
        """Watch until the end; all methods below belong to this thread."""
        try:
            self._watch_workers()
        except Exception:
            logger.exception("the thread that watches the workers failed")
            self._fail("the thread that watches the workers failed")

    def _watch_workers(self) -> None:
        poller = zmq.Poller()
        for each in (self._control, self._monitor.socket, self._woken):
            poller.register(each, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        last, next_beat, is_over = time.monotonic(), 0.0, False
        while not is_over:
            ready = dict(poller.poll(_TICK_MS))
            if self._gate is not None and self._gate.socket in ready:
                self._gate.answer()
            if self._woken in ready:
                is_over = self._woken.recv() == b"end"
            self._send_outgoing()
            while self._control.poll(0):
                self._take(*self._control.recv_multipart(copy=False)[:2])
            self._note_changes()
            now = time.monotonic()
            # If this process was stopped or starved itself, messages may be waiting unread.
            passed, last = min(now - last, 2 * TICK_SECONDS), now
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._send_to(None, LeaderBeat())
            if self._watch is not None and (reason := self._watch.verdict(passed)) is not None:
                self._fail(reason)
            is_over = is_over or self._failure is not None
        self._monitor.close()
        for each in (self._control, self._woken):
            each.close()
        self._has_ended.set()

    def _send_outgoing(self) -> None:
        while not self._outgoing.empty():
            self._send_to(*self._outgoing.get())

    def _send_to(self, rank: int | None, message: ClusterMessage) -> None:
        payload = encode(message)
        for identity in self._roll.identities() if rank is None else [self._roll.identity(rank)]:
            with contextlib.suppress(zmq.ZMQError):  # it has gone; the monitor or its silence shows it
                self._control.send_multipart((identity, payload), zmq.NOBLOCK)

    def _take(self, identity: zmq.Frame, payload: zmq.Frame) -> None:
        sender, descriptor = identity.bytes, payload.get(zmq.SRCFD)
        try:
            message = decode_to_leader(payload.bytes)
        except msgspec.MsgspecError:
            if self._roll.rank_of(sender) is None:
                # Before the first valid message the sender may be of another version.
                self._refuse(sender, "its messages cannot be read; install the same version on all hosts")
            else:
                self._fail(f"{self._name(sender)} sent an invalid message")
            return
        if isinstance(message, Hello):
            refusal = self._roll.join(sender, descriptor, message)
            if refusal is not None:
                self._refuse(sender, refusal.reason, refusal.param)
            return
        rank = self._roll.rank_of(sender)
        if rank is None or self._watch is None:
            return  # refused, or gone
        self._watch.hear(rank)
        match message:
            case WorkerBeat():
                self._watch.take_beat(rank, message)
            case Report():
                self._watch.take_report(rank, message)
            case WorkerFailed(reason, param=param, is_config=is_config):
                flag = f"--{param.replace('_', '-')}: " if is_config and param else ""
                self._fail(
                    f"{self._watch.name(rank)} failed: {flag}{reason}",
                    ExitStatus.CONFIG if is_config else ExitStatus.CLUSTER_LOST,
                )
            case _:
                self._received.put((rank, message))

    def _refuse(self, sender: bytes, reason: str, param: str | None = None) -> None:
        logger.warning("refused a process: %s", reason)
        with contextlib.suppress(zmq.ZMQError):  # it has gone
            self._control.send_multipart((sender, encode(Refused(reason, param))), zmq.NOBLOCK)

    def _note_changes(self) -> None:
        for change, descriptor in self._monitor.changes():
            if change is Change.WRONG_KEY:
                logger.warning("refused a connection: it has a wrong cluster key, or none")
            rank = self._roll.leave(descriptor) if change is Change.LOST else None
            if rank is not None and self._watch is not None:
                self._fail(f"{self._watch.name(rank)} closed its connection: it was killed or has ended")

    def _name(self, sender: bytes) -> str:
        rank = self._roll.rank_of(sender)
        return "a process" if self._watch is None or rank is None else self._watch.name(rank)

    def _fail(self, reason: str, status: ExitStatus = ExitStatus.CLUSTER_LOST) -> None:
        """End the cluster; only the first reason counts."""
        if self._failure is not None:
            return
        self._failure = reason
        logger.error("the cluster is lost: %s", reason)
        self._send_to(None, Stop(status, reason))
        self._received.put(None)
        self._has_ended.set()
        self._lost(reason, status)


def _ranks(ranks: list[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))
