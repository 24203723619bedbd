"""FastServe's skip-join multi-level feedback queue (Wu et al., arXiv 2305.05920, section 4.1), without swapping.

Queues have priorities and quanta of service, each `ratio` times that of the queue above. A new request skips to the
highest queue whose quantum covers its first iteration, which processes the prompt. A request that has used up the
quantum of its queue moves down, and one that has waited for `starvation` seconds moves up to the first queue. In each
iteration the first requests of the highest queues run; the others are paused between two tokens.

Service is counted in processed tokens, and not in profiled seconds as in the paper. Section 4.2, the proactive swap of
keys and values to the host, is left out: a request that loses its pages computes its tokens again.
"""

from math import inf
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class SkipJoinMlfq:
    """The highest queue first, and within a queue the first to arrive.

    Args:
        quantum: tokens of service in the first queue.
        ratio: quantum of a queue to the one above.
        num_queues: queues; the last one has no quantum.
        starvation: seconds without service after which a job moves to the first queue.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = False
    preempts: ClassVar[bool] = True
    is_static: ClassVar[bool] = False

    def __init__(
        self, quantum: int = 32, ratio: int = 2, num_queues: int = 8, starvation: float = inf
    ) -> None:
        self._quanta = [quantum * ratio**level for level in range(num_queues - 1)] + [inf]
        self._starvation = starvation
        self._levels: dict[int, int] = {}
        self._used: dict[int, float] = {}  # of the quantum
        self._served: dict[int, float] = {}  # time of the latest service
        self._now = 0.0

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """The queue of a job."""
        return (self._levels[job.index],)

    def decide(self, view: PolicyView) -> Decision:
        """Let new jobs join, move others up or down, and run the first ones."""
        self._now = view.now
        for job in (*view.residents, *view.waiting):
            if job.index not in self._levels:
                self._join(
                    job,
                    next(n for n, quantum in enumerate(self._quanta) if quantum >= job.num_prompt),
                )
            elif self._used[job.index] >= self._quanta[self._levels[job.index]]:
                self._join(job, self._levels[job.index] + 1)
            elif view.now - self._served[job.index] > self._starvation:
                self._join(job, 0)
        return view.in_order(self)

    def _join(self, job: RequestView, level: int) -> None:
        self._levels[job.index], self._used[job.index], self._served[job.index] = (
            level,
            0.0,
            self._now,
        )

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Count the service of a job."""
        self._used[job.index] += num_tokens
        self._served[job.index] = self._now

    def ended(self, job: RequestView) -> None:
        """Forget a job."""
        for of_jobs in (self._levels, self._used, self._served):
            of_jobs.pop(job.index, None)
