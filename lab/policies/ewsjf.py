"""EWSJF, effective workload-based shortest job first (Sidik, Levi and Kampeas, arXiv 2601.21758), by its authors' code.

Waiting requests stand in queues by the length of their prompts, each with a width of `step` tokens and in the order of
arrival. The queue whose first request has the largest score is served first. The score is the time that the request has
waited, times 1 + `weight` ln(length + 1), times step / (1 + number of the queue): long prompts wait longer, and not for
ever. Beside admission, batches are those of chunked prefill.

This is the calculator of the authors' vLLM scheduler (pull request 33392 of vLLM), whose cost of a request is the
constant 1. There a queue is chosen once for an iteration; here, if the first queue is empty, the next one follows. The
paper's tuning of boundaries and weights is not in that file, and not here.
"""

from collections.abc import Mapping
from math import log
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class Ewsjf:
    """The queue of prompts whose first job has the largest score.

    Args:
        step: tokens of a prompt from one queue to the next.
        weight: weight of the logarithm of the length.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = True
    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = False

    def __init__(self, step: int = 200, weight: float = 0.5) -> None:
        self._step = step
        self._weight = weight
        self._scores: Mapping[int, float] = {}  # of the first jobs, by the number of the queue

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """Residents by arrival, then the queues by their scores."""
        if job.is_resident:
            return (-1.0,)
        return 0.0, -self._scores[job.num_prompt // self._step], job.num_prompt // self._step

    def score(self, job: RequestView, now: float) -> float:
        """The score of a job."""
        number = job.num_prompt // self._step
        growth = 1 + self._weight * log(job.num_prompt + 1)
        return (now - job.arrival) * growth * self._step / (number + 1)

    def decide(self, view: PolicyView) -> Decision:
        """Choose within the order of the scores."""
        scores: dict[int, float] = {}
        for job in view.waiting:  # by arrival
            number = job.num_prompt // self._step
            if number not in scores:
                scores[number] = self.score(job, view.now)
        self._scores = scores
        return view.in_order(self)

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: scores are new in each decision."""

    def ended(self, job: RequestView) -> None:
        """Does nothing: scores are new in each decision."""
