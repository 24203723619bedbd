"""In which order a scheduler considers requests (`--scheduling-policy`)."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from orca_jax.request import Request
from orca_jax.sched.pool import RequestPool


class Ordering(Protocol):
    """Most urgent first. An ordering reads the pool and changes nothing in it."""

    name: str

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """The requests that hold rows."""
        ...

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """The requests without one; lazily where the order allows, for there may be thousands."""
        ...


class FirstComeFirstServed:
    """The order of arrival, as in the paper; a preempted request keeps its place."""

    name = "fcfs"

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """By arrival."""
        return sorted(pool.running.values(), key=lambda request: request.arrival_index)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """By arrival."""
        return (request for request in pool if request.row is None)
