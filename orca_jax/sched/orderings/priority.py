"""Order by the caller's priority, with bounded overtaking."""

from orca_jax.sched.orderings.base import KeyOrdering
from orca_jax.sched.request import Request

SECONDS_PER_STEP = 10.0
"""Seconds added to the arrival of a request for each step of its priority."""


class Priority(KeyOrdering):
    """The lowest priority first, as in vLLM, and one priority in order of arrival; but waiting raises urgency.

    The key is the arrival plus `SECONDS_PER_STEP` for each step of priority. So a request is overtaken by a request of
    a priority k steps lower only if the latter arrives within `k * SECONDS_PER_STEP` after it, and never by a request
    arriving later. With `request.MAX_PRIORITY` the bound is 2000 seconds. vLLM's own order has no such bound: a stream
    of urgent requests keeps all others waiting for ever.
    """

    reads = frozenset({"priority"})

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        """The arrival, later by the priority."""
        return (request.arrival + SECONDS_PER_STEP * request.urgency.priority,)
