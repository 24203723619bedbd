"""The contract of an ordering: it sorts requests by urgency, and does nothing else."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import ClassVar, Protocol

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request


class Ordering(Protocol):
    """Sorts requests, the most urgent first. It reads the pool without changing it, and may have state of its own.

    The order of two running requests never changes. Otherwise two requests too large to run together could take
    each other's pages for ever. Each ordering bounds overtaking, so that no request waits for ever.
    """

    name: str
    reads_predictions: ClassVar[bool]  # of output lengths

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """The requests with rows; the last one is preempted first."""
        ...

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """The requests able to get a row, lazily, since there may be thousands.

        A preempted request is not among them while an iteration of it is in flight.
        """
        ...

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count `num_tokens` tokens chosen for a request; a newcomer has no row yet."""
        ...


by_arrival: Callable[[Request], int] = attrgetter("arrival_index")
"""Sort key for the order of arrival."""
