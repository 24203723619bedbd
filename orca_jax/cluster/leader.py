"""The leader: gathers the workers, sends them the calls of the executor, and watches them.

All of this is the main thread, which owns the plan socket and sends there without waiting. Another thread
(`control.py`) owns the control socket.
"""

import logging
import secrets
import time

import zmq

from orca_jax.cluster.control import TICK_MS, TICK_SECONDS, ControlThread, Lost
from orca_jax.cluster.digest import Digests
from orca_jax.cluster.exits import ExitStatus
from orca_jax.cluster.keys import keys_of
from orca_jax.cluster.messages import (
    Call,
    ClusterMessage,
    DataPlane,
    Hello,
    Stop,
    ToLeader,
    Welcome,
    encode,
)
from orca_jax.cluster.roll import Roll
from orca_jax.cluster.sockets import LINGER_MS, bind, check_free, leader_socket, place, resolve
from orca_jax.cluster.watch import WorkerWatch
from orca_jax.values.errors import ClusterLostError, ConfigError
from orca_jax.values.startup import ClusterConfig

_NEWS_SECONDS = 10.0  # between two lines of the log about missing workers
_EXPLAIN_SECONDS = 2.0  # for the control thread to find the reason of a failure in the main thread

logger = logging.getLogger(__name__)


class Leader:
    """The leader's side of a cluster. Made and used by the main thread.

    Args:
        config: the configuration of the cluster.
        lost: called if a worker is lost, stuck or diverged, or has failed.
        has_devices: False for the toy.

    Raises:
        ConfigError: the address or the key file is wrong, or there is no key file.
    """

    def __init__(self, config: ClusterConfig, lost: Lost, *, has_devices: bool) -> None:
        ip = resolve(config.master_addr)
        keys = keys_of(config)
        self.config = config
        # the name, for its certificate
        self.coordinator = place(config.master_addr, config.master_port + 2)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._roll = Roll(config.nnodes, has_devices=has_devices)
        try:
            self._plans = leader_socket(self._context, keys)
            bind(self._plans, ip, config.master_port + 1)
            check_free(ip, config.master_port + 2)
            self._control = ControlThread(
                self._context, ip, config.master_port, keys, self._roll, lost
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._identities: list[bytes] = []  # of the workers on the plan socket
        self._watch: WorkerWatch | None = None  # from the welcome on
        self._is_closed = False

    def gather(self) -> list[Hello]:
        """Wait for all workers; return what they have sent, by rank.

        Raises:
            ConfigError: they did not come in time.
        """
        deadline = time.monotonic() + self.config.join_timeout
        news = time.monotonic() + _NEWS_SECONDS
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
        names = [self._roll.name(hello.rank) for hello in hellos]
        self._watch = self._control.watch = WorkerWatch(names, self.config.control_timeout)
        for rank, identity in enumerate(self._identities, start=1):
            self._control.send(rank, Welcome(identity, data_plane))

    def send_all(self, message: ClusterMessage) -> None:
        """Send a message to all workers on the control socket."""
        self._control.send(None, message)

    def expect[M: ToLeader](self, kind: type[M]) -> list[M]:
        """Wait for a message of this kind from each worker; return them by rank."""
        found: dict[int, M] = {}
        while len(found) < self.config.nnodes - 1:
            received = self._control.received.get()
            if received is None:
                raise ClusterLostError(self._control.failure or "the cluster has ended")
            rank, message = received
            if not isinstance(message, kind):
                raise ClusterLostError(
                    f"worker {rank} sent {type(message).__name__} instead of {kind.__name__}"
                )
            found[rank] = message
        return [found[rank] for rank in sorted(found)]

    def expect_plan_sockets(self) -> None:
        """Wait until each worker listens to plans."""
        awaited = set(self._identities)
        while awaited:
            self._raise_if_lost()
            if self._plans.poll(TICK_MS):
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
        payload = encode(call)
        for identity in self._identities:
            try:
                self._plans.send_multipart((identity, payload), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise self.explain(
                    ClusterLostError(f"a worker does not take plans: {error}")
                ) from None
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

        The devices may notice a loss before the control thread, so this waits for a moment.
        """
        self._control.has_ended.wait(_EXPLAIN_SECONDS)
        if self._control.failure is None:
            return error
        return ClusterLostError(self._control.failure)

    def close(self, status: int = ExitStatus.DONE) -> None:
        """Make the workers end, and close the sockets. `status` is that of this process."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._control.has_ended.is_set():
            end = Stop(ExitStatus.LEADER_LOST, "the leader has failed")
            self._control.send(
                None, end if status else Stop(ExitStatus.DONE, "the leader has ended")
            )
        if self._control.close(_EXPLAIN_SECONDS):
            self._context.destroy(linger=LINGER_MS)

    def _raise_if_lost(self) -> None:
        if self._control.failure is not None:
            raise ClusterLostError(self._control.failure)


def _ranks(ranks: list[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))
