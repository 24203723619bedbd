"""SRPT, the shortest remaining processing time first (Schrage and Miller, 1966), by predicted lengths.

With true lengths it has the least mean latency of one server (Schrage, 1968). `job.predicted` comes from the engine's
length predictor; `noise` multiplies it by a factor exp(noise x) with a normal x for each request, to see how much a
worse prediction costs. A request that outlives its prediction counts as one with one token left, as in TRAIL (Shahout
et al., ICLR'25), whose bound `limit` is here too: a request that has generated `limit` of its predicted tokens is not
interrupted any more, since its pages are then worth the most.
"""

import random
from math import exp
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class Srpt:
    """The job with the fewest tokens left first.

    Args:
        noise: standard deviation of the logarithm of the noise on predictions.
        limit: share of the predicted tokens after which a resident is not interrupted.
        counts_prompt: True if tokens of the prompt that are to be processed count too.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"predicted"})
    may_starve: ClassVar[bool] = True
    preempts: ClassVar[bool] = True
    is_static: ClassVar[bool] = False

    def __init__(self, noise: float = 0.0, limit: float = 1.0, counts_prompt: bool = False) -> None:
        self._noise = noise
        self._limit = limit
        self._counts_prompt = counts_prompt

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """Uninterruptible residents, then all by the expected number of tokens left."""
        done = job.num_generated + job.num_pending
        length = job.predicted
        if self._noise:
            length *= exp(self._noise * random.Random(job.index).gauss(0, 1))
        if job.is_resident and self._limit < 1 and done >= self._limit * length:
            return (-1.0,)
        left = max(1.0, length - done)
        return (left + max(0, job.num_prompt - job.num_computed) if self._counts_prompt else left,)

    def decide(self, view: PolicyView) -> Decision:
        """Run the jobs with the fewest tokens left."""
        return view.in_order(self)

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: each decision reads all jobs anew."""

    def ended(self, job: RequestView) -> None:
        """Does nothing: no job is remembered."""
