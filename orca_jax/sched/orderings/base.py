"""What every ordering is: it says who comes first, and nothing else."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request


class Ordering(Protocol):
    """Most urgent first. An ordering reads the pool and changes nothing in it; what it remembers is its own.

    The order of two running requests never changes, so that two which do not fit together cannot take each other's
    pages for ever. Each ordering says who may overtake whom, so that nobody waits for ever either.
    """

    name: str

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """The requests that hold rows; whoever comes last is preempted first."""
        ...

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """The requests that could get a row, lazily, for there may be thousands.

        Not those whose last token is still on the device: they were preempted a moment ago, and come back later.
        """
        ...

    def charge(self, request: Request, num_tokens: int) -> None:
        """The request was chosen to process so many tokens; a newcomer still has no row."""
        ...


def is_idle(request: Request) -> bool:
    """Whether a request could get a row now."""
    return request.row is None and not request.in_flight


by_arrival: Callable[[Request], int] = attrgetter("arrival_index")
"""The key of the order of arrival."""
