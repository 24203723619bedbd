"""The contract of a proposer, and its record of accepted proposals."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from orca_jax.sched.request import Request

MEMORY = 24
"""Tests in the memory of an `Acceptance`: the weight of older ones falls."""
_PRIOR_WEIGHT = 4
_DRIFT = 0.02


class Wish(NamedTuple):
    """A request, and the number of ids to propose for it."""

    request: Request
    number: int


class Chance(NamedTuple):
    """The chances of the proposals for one request."""

    any: float  # that there are proposals
    each: float  # that a proposed id is drawn, if those before it were


class Acceptance:
    """The share of hits among tests, such as drawn ids among proposed ones. The weight of old tests falls.

    Args:
        prior: the share before any test.
    """

    __slots__ = ("_hits", "_tests")

    def __init__(self, prior: float) -> None:
        self._hits = _PRIOR_WEIGHT * prior
        self._tests = float(_PRIOR_WEIGHT)

    @property
    def rate(self) -> float:
        """The share as known now."""
        return self._hits / self._tests

    def add_tests(self, hits: int, tests: int) -> None:
        """Count `tests` ids, `hits` of them drawn."""
        keep = max(0.0, 1 - tests / MEMORY)
        self._hits = keep * self._hits + hits
        self._tests = keep * self._tests + tests

    def relax(self, prior: float) -> None:
        """Move the share a little towards `prior`, for want of tests."""
        self._hits += _DRIFT * (prior * self._tests - self._hits)


class Proposer(Protocol):
    """Proposes the next ids of requests. A wrong proposal costs time and nothing else."""

    @property
    def seconds(self) -> float:
        """Expected time of the host and of other devices to propose one more id for all requests of an iteration."""
        ...

    def chance(self, request: Request) -> Chance:
        """The chances for a request, from the tokens known to the host, while no id is proposed for it."""
        ...

    def ready(self, request: Request) -> int:
        """The number of ids that can be proposed now. All tokens of the request are known to the host."""
        ...

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """Ids to follow each request, as many as wished or fewer."""
        ...

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Take the result of the last proposals for a request, unless it has ended."""
        ...
