"""A policy of an order: the decisions of the scheduler `chunked` with its keys."""

from collections.abc import Callable
from typing import ClassVar

from orca_jax.policy.protocol import API, Decision, Order, PolicyView, RequestView
from orca_jax.sched.blocks import BlockCount
from orca_jax.sched.orderings.base import KeyOrdering
from orca_jax.sched.request import Request


class Ordered:
    """The decisions of `PolicyView.in_order`, for a scheduler that is an order and nothing else.

    Args:
        order: gives the keys. Its `charge(job, num_tokens)`, if it has one, is called for each job of an iteration.
        watermark: pages to keep free when a job is admitted beside others.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = True

    def __init__(self, order: Order, watermark: BlockCount = 0) -> None:
        self.order = order
        self.watermark = watermark
        self._charge: Callable[[RequestView, int], None] | None = getattr(order, "charge", None)

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Let the order count the tokens of a job."""
        if self._charge is not None:
            self._charge(job, num_tokens)

    def ended(self, job: RequestView) -> None:
        """Does nothing: a queue forgets jobs that have ended."""

    def decide(self, view: PolicyView) -> Decision:
        """The batch in this order."""
        return view.in_order(self.order, self.watermark)


class OutsideOrdering(KeyOrdering):
    """The ordering of a `policy.Order`. Its charge is counted when a decision is applied, and not here.

    Args:
        order: gives the keys.
        job_of: the view of a request.
    """

    def __init__(self, order: Order, job_of: Callable[[Request], RequestView]) -> None:
        self.order = order
        self.is_static = order.is_static
        self._job_of = job_of

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        """The key of the job of a request."""
        return self.order.key(self._job_of(request), now)
