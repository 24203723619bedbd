"""LPM and k-LPM: admission by longest prefix match (Dexter et al., NeurIPS'25, arXiv 2502.04677, section 4).

LPM, SGLang's order, admits the waiting request with the longest prefix in the cache first. It reuses the most tokens,
and a request without a cached prefix may wait for ever. k-LPM repeats: the request that has waited longest, then k - 1
by longest prefix match. With k = 1 it is first come, first served; with an unbounded k it is LPM.

Beside admission, batches are those of chunked prefill. A match counts the tokens that are in the cache at the moment of
the decision.
"""

from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class PrefixMatch:
    """The longest waiting job, then k - 1 jobs with the longest matches, and again.

    Args:
        k: jobs of a round; None: all by longest match (LPM).
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = True
    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = False

    def __init__(self, k: int | None = None) -> None:
        self.k = k
        self._admitted = 0
        self._places: dict[int, int] = {}  # of waiting jobs

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """Residents by arrival, then waiting jobs by their places."""
        return (-1.0,) if job.is_resident else (self._places[job.index],)

    def decide(self, view: PolicyView) -> Decision:
        """Choose within the order of the round."""
        oldest = list(view.waiting)  # by arrival
        matched = sorted(oldest, key=lambda job: -job.num_cached) if self.k != 1 else oldest
        self._places = {}
        first = iter(oldest)
        best = iter(matched)
        for place in range(len(oldest)):
            is_first = self.k is not None and (self._admitted + place) % self.k == 0
            job = next(
                job for job in (first if is_first else best) if job.index not in self._places
            )
            self._places[job.index] = place
        return view.in_order(self)

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Count the admitted jobs."""
        self._admitted += not job.is_resident

    def ended(self, job: RequestView) -> None:
        """Does nothing: places are new in each decision."""
