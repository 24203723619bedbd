"""SageSched: the least Gittins index of a distribution of costs (Gan et al., arXiv 2603.07917), by its abstract alone.

A request's output length is a distribution, from earlier requests with prompts like its own, and its cost counts the
processor and the memory. The policy is aware of the uncertainty: first comes the request with the least ratio of
expected cost to the chance to end, over all lengths at which one may stop it (Gittins, 1979). So a request that has
outlived the usual lengths gives way, and one that is about to end does not.

The abstract leaves open what is chosen here. Prompts are alike if their lengths have the same power of two. The cost of
a token is one, for the processor, and `memory` times the tokens held, by `scale` of them. An index is computed anew
after each `quantum` tokens, so that residents do not take turns.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView

_PATIENCE = 32
"""Decisions without a resident, before it goes first: the engine overrules a policy after 64."""


class SageSched:
    """The job with the least expected cost for its chance to end.

    Args:
        memory: weight of the memory beside the processor.
        scale: tokens held that weigh as much as one computed, at a weight of 1.
        quantum: generated tokens after which an index is computed again.
        history: lengths of earlier jobs that a group of prompts keeps.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = True
    preempts: ClassVar[bool] = True
    is_static: ClassVar[bool] = False

    def __init__(
        self, memory: float = 1.0, scale: int = 1024, quantum: int = 32, history: int = 256
    ) -> None:
        self._memory = memory
        self._scale = scale
        self._quantum = quantum
        self._history = history
        self._recent: dict[int, deque[int]] = {}  # lengths by groups, in the order of their ends
        self._sorted: dict[int, list[int]] = {}
        self._indices: dict[int, tuple[int, float]] = {}  # of jobs: quanta so far, and the index
        self._decisions = 0
        self._latest: dict[int, int] = {}  # decisions in which jobs ran

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """Residents that were left out for long, then all by the index, which is new after each quantum."""
        latest = self._latest.get(job.index, self._decisions)
        if job.is_resident and self._decisions - latest > _PATIENCE:
            return (-1.0,)
        quanta = (job.num_generated + job.num_pending) // self._quantum
        known = self._indices.get(job.index)
        if known is None or known[0] != quanta:
            known = quanta, self._index(job, quanta * self._quantum)
            self._indices[job.index] = known
        return (known[1],)

    def _index(self, job: RequestView, done: int) -> float:
        lengths = self._sorted.get(job.num_prompt.bit_length(), [])
        lengths = lengths[bisect_right(lengths, done) :]
        if not lengths:  # nothing is known, or the job has outlived all others
            return self._cost(job, done, max(done + 1, job.max_tokens))
        return gittins([self._cost(job, done, length) for length in lengths])

    def _cost(self, job: RequestView, done: int, length: int) -> float:
        """The cost from `done` tokens to a length."""
        count = length - done
        held = count * (job.num_prompt + (done + length) / 2)
        prompt = 0 if done else job.num_prompt
        return prompt / self._scale + count + self._memory * held / self._scale

    def decide(self, view: PolicyView) -> Decision:
        """Run the jobs with the least indices."""
        self._decisions += 1
        return view.in_order(self)

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Note that the job runs."""
        self._latest[job.index] = self._decisions

    def ended(self, job: RequestView) -> None:
        """Remember the length of the job."""
        self._indices.pop(job.index, None)
        self._latest.pop(job.index, None)
        group = job.num_prompt.bit_length()
        recent = self._recent.setdefault(group, deque())
        lengths = self._sorted.setdefault(group, [])
        recent.append(job.num_generated)
        insort(lengths, job.num_generated)
        if len(recent) > self._history:
            lengths.remove(recent.popleft())


def gittins(costs: Sequence[float]) -> float:
    """The least ratio of expected cost to the chance to end, of equally likely costs in rising order.

    One may stop at each of the costs; a job that has not ended then costs as much.
    """
    best = float("inf")
    total = 0.0
    for number, cost in enumerate(costs, 1):
        total += cost
        expected = total + (len(costs) - number) * cost
        best = min(best, expected / number)
    return best
