"""Order by predicted output, the shortest first, with bounded overtaking."""

from orca_jax.sched.orderings.base import KeyOrdering
from orca_jax.sched.request import Request

SECONDS_PER_TOKEN = 0.5
"""Seconds added to the arrival of a request for each token of its predicted output."""


class ShortestFirst(KeyOrdering):
    """The lowest `Request.predicted_output` first; but waiting raises urgency.

    The key is the arrival plus `SECONDS_PER_TOKEN` for each predicted token. So a request of p tokens is overtaken by
    one of q tokens only if the latter arrives within `SECONDS_PER_TOKEN * (p - q)` after it. It is never overtaken by a
    request arriving `SECONDS_PER_TOKEN * (p - 1)` after it or later. p is at most the client's `max_tokens`, so a
    caller can compute the bound from its own parameters. Plain shortest-first has no such bound.

    The key never changes: the whole output of a running request counts, not the rest of it. Otherwise two requests
    too large to run together could take each other's pages for ever. No request is interrupted for a shorter one;
    the order decides admission, and preemption when pages run out. Prompts do not count: they are processed in chunks
    beside the increments of all others.
    """

    reads = frozenset({"predicted"})

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        """The arrival, later by the predicted output."""
        return (request.arrival + SECONDS_PER_TOKEN * request.predicted_output,)
