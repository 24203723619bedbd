"""The main thread of a worker: it repeats the leader's calls on its own executor.

All calls are made in the leader's order by one thread, so that the devices of all processes run the same programs in
the same order. Another thread waits for the devices, and results are read as soon as they are there.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import zmq

from orca_jax.cluster.digest import Digester
from orca_jax.cluster.messages import (
    Allowed,
    Iteration,
    Report,
    Rest,
    WorkerBeat,
    decode_call,
    read_sets,
)
from orca_jax.cluster.worker_link import WorkerLink
from orca_jax.values.step import Executor, Handle

Stillness = Callable[[int | None], tuple[float, float, str]]
"""(a counter of progress, or None without work) -> seconds without progress, their limit, and the place."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Begun:
    """An iteration in flight."""

    number: int
    handle: Handle
    payloads: list[bytes]  # the messages that describe it
    is_complete: bool  # False until its sets of allowed ids have come


class WorkerStatus:
    """The content of a worker's heartbeats. The main thread writes, and the connection's thread reads."""

    def __init__(self) -> None:
        self.stillness: Stillness | None = None  # None while the worker loads
        self.num_begun = 0
        self.num_done = 0
        self.turns = 0  # of the main thread
        self.has_work = False  # for the main thread or the devices

    def beat(self) -> WorkerBeat:
        """The heartbeat of this moment."""
        if self.stillness is None:
            return WorkerBeat(0, 0, 0.0, 0.0, "")
        still, limit, place = self.stillness(self.turns if self.has_work else None)
        return WorkerBeat(self.num_begun, self.num_done, still, limit, place)


class Follower:
    """Repeats the leader's calls.

    Args:
        executor: owned by the thread that calls `repeat_calls`.
        plans: the socket for plans.
        link: takes reports.
        status: updated with the progress of the thread.
    """

    def __init__(
        self, executor: Executor, plans: "zmq.Socket[bytes]", link: WorkerLink, status: WorkerStatus
    ) -> None:
        self._executor = executor
        self._plans = plans
        self._link = link
        self._status = status
        self._digest = Digester()
        self._in_flight: deque[_Begun] = deque()
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="result")
        self._awaited: Handle | None = None  # given to the waiter
        self._woken, self._wake = link.wake_pair()

    def repeat_calls(self) -> NoReturn:
        """Repeat calls until the connection's thread ends the process."""
        poller = zmq.Poller()
        status = self._status
        poller.register(self._plans, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            # A complete iteration in flight is work of the devices; one that waits for its sets is not.
            status.has_work = bool(self._in_flight) and self._in_flight[0].is_complete
            ready = dict(poller.poll())
            status.has_work = True
            status.turns += 1
            if self._woken in ready:
                self._woken.recv()
                if self._in_flight and self._in_flight[0].handle is self._awaited:
                    self._collect()
            if self._plans in ready:
                self._apply(self._plans.recv())

    def _apply(self, payload: bytes) -> None:
        match decode_call(payload):
            case Iteration(plan, num_collected):
                while self._status.num_done < num_collected:
                    self._collect()
                handle = self._executor.submit(plan)
                self._in_flight.append(
                    _Begun(plan.iteration, handle, [payload], not plan.is_constrained)
                )
                self._status.num_begun += 1
            case Allowed() as allowed:
                newest = self._in_flight[-1]
                self._executor.constrain(newest.handle, read_sets(allowed))
                newest.payloads.append(payload)
                newest.is_complete = True
            case Rest():
                while self._in_flight:
                    self._collect()
                self._executor.rest()
        self._await_oldest()

    def _collect(self) -> None:
        oldest = self._in_flight.popleft()
        result = self._executor.collect(oldest.handle)
        self._status.num_done += 1
        self._status.turns += 1
        self._link.send(Report(oldest.number, self._digest.add_iteration(oldest.payloads, result)))
        self._await_oldest()

    def _await_oldest(self) -> None:
        """Make the other thread wait for the oldest iteration."""
        if (
            self._in_flight
            and self._in_flight[0].is_complete
            and self._in_flight[0].handle is not self._awaited
        ):
            self._awaited = self._in_flight[0].handle
            self._waiter.submit(self._wait, self._awaited)

    def _wait(self, handle: Handle) -> None:
        try:
            self._executor.wait(handle)
        finally:
            self._wake.send(b"")
