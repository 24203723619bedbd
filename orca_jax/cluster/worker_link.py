"""A worker's connection to the leader, in its own thread: first messages, heartbeats, reports, and the end."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.keys import keys_of
from orca_jax.cluster.messages import (
    ClusterMessage,
    Hello,
    InvalidMessageError,
    LeaderBeat,
    Refused,
    Stop,
    ToWorker,
    Welcome,
    WorkerBeat,
    WorkerFailed,
    decode_to_worker,
    encode,
)
from orca_jax.cluster.sockets import Change, ConnectionMonitor, place, resolve, worker_socket
from orca_jax.values.errors import ConfigError
from orca_jax.values.startup import LOADING_SILENCE, ClusterConfig

BEAT_SECONDS = 0.5
TICK_SECONDS = 0.25
_TICK_MS = 250
_NEWS_SECONDS = 10.0  # between two lines of the log while there is no leader
_NAME_SECONDS = 5.0  # between two looks for the leader's name
_MOST_FAILURES = 3  # handshakes that fail in a row without a reason: the keys differ

Beat = Callable[[], WorkerBeat]
"""Makes a heartbeat of this moment; called in the connection's thread."""
Lost = Callable[[str, int], None]
"""Called in the connection's thread, once, with the reason and the exit status for this process."""

logger = logging.getLogger(__name__)


class WorkerLink:
    """The connection to the leader. Made and used by the main thread.

    Args:
        config: the configuration of the cluster.
        hello: the first message.
        beat: makes heartbeats.
        lost: called if the leader is lost or stops this process.

    Raises:
        ConfigError: the key file is wrong, or there is none.
    """

    def __init__(self, config: ClusterConfig, hello: Hello, beat: Beat, lost: Lost) -> None:
        self.config = config
        self._hello = hello
        self._beat = beat
        self._lost = lost
        self._ip = ""  # of the leader
        self._keys = keys_of(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = worker_socket(self._context, self._keys)
        self._monitor = ConnectionMonitor(self._control)
        self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._woken.bind("inproc://to-link")
        self._wake.connect("inproc://to-link")
        # for the main thread
        self._received: queue.SimpleQueue[ToWorker | ConfigError] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[ClusterMessage] = queue.SimpleQueue()
        self._is_welcome = False
        self._is_serving = False
        self._over = threading.Event()
        self._num_failures = 0
        self._silence = 0.0
        self._own_status: int | None = None  # of this process, if it has failed itself
        self._thread = threading.Thread(target=self._run, daemon=True, name="cluster")

    def join(self) -> Welcome:
        """Wait for the leader's welcome.

        Raises:
            ConfigError: the leader refuses this process, the keys differ, or there is no leader.
        """
        deadline = time.monotonic() + self.config.join_timeout
        self._ip = self._resolve(deadline)
        self._control.connect(f"tcp://{place(self._ip, self.config.master_port)}")
        self._thread.start()
        address = place(self.config.master_addr, self.config.master_port)
        while time.monotonic() < deadline:
            try:
                message = self._received.get(timeout=min(_NEWS_SECONDS, self.config.join_timeout))
            except queue.Empty:
                logger.info("waiting for the leader at %s and all other workers", address)
                continue
            match message:
                case Welcome():
                    return message
                case Refused(reason, param):
                    raise ConfigError(f"the leader has refused this process: {reason}", param=param)
                case ConfigError():
                    raise message
        raise ConfigError(f"there is no leader at {address}", param="master_addr")

    def plan_socket(self, welcome: Welcome) -> "zmq.Socket[bytes]":
        """Connect the socket for plans; it belongs to the caller's thread."""
        plans = worker_socket(self._context, self._keys, welcome.identity)
        plans.connect(f"tcp://{place(self._ip, self.config.master_port + 1)}")
        plans.send(b"")  # shows the leader that it is there
        return plans

    def wake_pair(self) -> "tuple[zmq.Socket[bytes], zmq.Socket[bytes]]":
        """Two connected sockets, by which a thread can wake the main thread."""
        ours = self._context.socket(zmq.PAIR)
        theirs = self._context.socket(zmq.PAIR)
        ours.bind("inproc://to-main")
        theirs.connect("inproc://to-main")
        return ours, theirs

    def send(self, message: ClusterMessage) -> None:
        """Send a message to the leader."""
        self._outgoing.put(message)
        self._wake.send(b"")

    def expect[M: ToWorker](self, kind: type[M]) -> M:
        """Wait for a message of this kind. Any other one, apart from heartbeats, is an error of the leader."""
        message = self._received.get()
        if not isinstance(message, kind):
            raise TypeError(f"the leader sent {type(message).__name__} instead of {kind.__name__}")
        return message

    def fail(self, message: WorkerFailed) -> None:
        """Report a failure of this process. The leader's answer ends it."""
        self._own_status = ExitStatus.CONFIG if message.is_config else ExitStatus.ENGINE_FAILED
        self.send(message)

    def serve(self) -> None:
        """Use the limits of serving processes from now on."""
        self._is_serving = True

    def _resolve(self, deadline: float) -> str:
        """The address of the leader, which may get its name later than this process starts."""
        while True:
            try:
                return resolve(self.config.master_addr)
            except ConfigError as error:
                if time.monotonic() + _NAME_SECONDS > deadline:
                    raise
                logger.info("waiting for the leader: %s", error.message)
                time.sleep(_NAME_SECONDS)

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # a thread must not end in silence
            logger.exception("the connection to the leader failed")
            self._lost(
                f"the connection to the leader failed: {type(error).__name__}",
                ExitStatus.ENGINE_FAILED,
            )

    def _follow(self) -> None:
        poller = zmq.Poller()
        for each in (self._control, self._monitor.socket, self._woken):
            poller.register(each, zmq.POLLIN)
        last = time.monotonic()
        next_beat = 0.0
        while not self._over.is_set():
            ready = dict(poller.poll(_TICK_MS))
            if self._woken in ready:
                self._woken.recv()
            while not self._outgoing.empty():
                self._send(self._outgoing.get())
            # before the messages: the last one came before the end
            changes = list(self._monitor.changes())
            while not self._over.is_set() and self._control.poll(0):
                self._read(self._control.recv())
            self._note(changes)
            now = time.monotonic()
            # If this process was stopped or starved itself, messages may be waiting unread.
            passed = min(now - last, 2 * TICK_SECONDS)
            last = now
            self._silence += passed
            if self._is_welcome and now >= next_beat:
                next_beat = now + BEAT_SECONDS
                self._send(self._beat())
            limit = self.config.control_timeout
            if not self._is_serving:
                limit = max(limit, LOADING_SILENCE)
            if self._is_welcome and self._silence > limit:
                self._end(
                    f"the leader has sent nothing for {limit:g} s (--control-timeout)",
                    ExitStatus.LEADER_LOST,
                )

    def _read(self, payload: bytes) -> None:
        try:
            self._take(decode_to_worker(payload))
        except InvalidMessageError:
            if self._is_welcome:
                self._end("the leader sent an invalid message", ExitStatus.LEADER_LOST)
            else:
                message = (
                    "the leader's messages cannot be read; install the same version on all hosts"
                )
                self._received.put(ConfigError(message, param="master_addr"))

    def _take(self, message: ToWorker) -> None:
        self._silence = 0.0
        match message:
            case LeaderBeat():
                pass
            case Stop(status, reason):
                self._end(reason, status)
            case _:
                self._is_welcome = self._is_welcome or isinstance(message, Welcome)
                self._received.put(message)

    def _note(self, changes: Iterable[tuple[Change, int]]) -> None:
        for change, _ in changes:
            if change is Change.CONNECTED:
                self._num_failures = 0
                self._send(self._hello)
            elif self._is_welcome:
                self._end(
                    "the leader has closed its connection: it was killed or has ended",
                    ExitStatus.LEADER_LOST,
                )
            elif change in (Change.WRONG_KEY, Change.NO_KEY):
                self._num_failures += 1 if change is Change.WRONG_KEY else _MOST_FAILURES
                if self._num_failures >= _MOST_FAILURES:
                    message = "the leader has another key, or none; copy its key file to all hosts"
                    self._received.put(ConfigError(message, param="cluster_key_file"))

    def _send(self, message: ClusterMessage) -> None:
        # the leader has gone; the monitor or its silence shows it
        with contextlib.suppress(zmq.ZMQError):
            self._control.send(encode(message), zmq.NOBLOCK)

    def _end(self, reason: str, status: int) -> None:
        """End this process; only the first reason counts."""
        if not self._over.is_set():
            self._over.set()
            self._lost(reason, status if self._own_status is None else self._own_status)
