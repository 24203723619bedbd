"""Sarathi-Serve: chunked prefills and stall-free batching (Agrawal et al., OSDI'24, arXiv 2403.02310, section 4).

Its Algorithm 3 builds an iteration within a budget of tokens: first every running request gets its increment, then the
requests with an unfinished prompt get a chunk, then new requests are admitted, each with a chunk of what is left of
the budget. Increments never wait for a prompt ("stall-free"). All are taken in the order of arrival.

`view.in_order` is this algorithm for any order; the order here is that of arrival. Pages are given on demand, as in the
paper's engine, and the latest request loses its pages when none is free.
"""

from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class Sarathi:
    """Increments, then chunks, then newcomers, by arrival."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = False
    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = True

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """Equal keys: the first to arrive comes first."""
        return ()

    def decide(self, view: PolicyView) -> Decision:
        """The batch of Algorithm 3."""
        return view.in_order(self)

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: each decision reads all jobs anew."""

    def ended(self, job: RequestView) -> None:
        """Does nothing: no job is remembered."""
