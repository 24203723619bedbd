"""The guard of the engine: whatever a policy decides, requests make progress."""

import logging

from orca_jax.policy.jobs import JobTable, PolicyRequest
from orca_jax.policy.protocol import Decision, PolicyView, RequestView
from orca_jax.sched.pool import RequestPool

PATIENCE = 64
"""Decisions in a row that may leave out the resident admitted longest ago."""

logger = logging.getLogger(__name__)


class Guard:
    """Overrules three kinds of decisions, and counts them.

    - The resident admitted longest ago keeps its pages until it has drawn a token since its admission. Otherwise two
      requests could take each other's pages for ever.
    - If it could run and is left out `PATIENCE` times in a row, it is added.
    - If nothing is in flight, and a decision is empty without `wake_after`, the oldest job runs.

    A job that it adds takes the place of others: the last jobs of the decision give up their places, tokens and pages,
    and the youngest residents their rows and pages.

    Args:
        name: name of the policy, for logs.
    """

    def __init__(self, name: str) -> None:
        self.num_overrules = 0
        self.last_reason = ""
        self._name = name
        self._oldest: PolicyRequest | None = None
        self._left_out = 0

    def overrule(
        self, decision: Decision, view: PolicyView, table: JobTable, pool: RequestPool
    ) -> Decision:
        """The decision, changed if progress demands it. It need not be one that can be applied."""
        oldest = table.residents[0] if table.residents else None
        if oldest is not self._oldest:
            self._oldest = oldest
            self._left_out = 0
        if oldest is not None:
            if (
                oldest in decision.evict
                and oldest.num_generated + oldest.num_pending <= oldest.admitted_with
            ):
                self._count(
                    f"{oldest!r}, the oldest resident, is evicted before it has drawn a token"
                )
                rest = Decision(decision.run, [job for job in decision.evict if job is not oldest])
                if oldest.num_left:
                    return _with_job(oldest, rest, view, table)
                return rest
            self._left_out = (
                0 if any(job is oldest for job, _ in decision.run) else self._left_out + 1
            )
            if self._left_out >= PATIENCE and oldest.num_left:
                self._left_out = 0
                self._count(
                    f"{oldest!r}, the oldest resident, was left out {PATIENCE} times in a row"
                )
                return _with_job(oldest, decision, view, table)
        if (
            not decision.run
            and decision.wake_after is None
            and not any(request.in_flight for request in pool)
        ):
            job = next((job for job in (*view.residents, *view.waiting) if job.num_left), None)
            if job is not None:
                self._count(f"the decision is empty, nothing is in flight, and {job!r} could run")
                return _with_job(job, decision, view, table)
        return decision

    def _count(self, reason: str) -> None:
        self.num_overrules += 1
        if self.num_overrules == 1:
            logger.warning("%s is overruled: %s", self._name, reason)
        self.last_reason = reason


def _with_job(job: RequestView, decision: Decision, view: PolicyView, table: JobTable) -> Decision:
    """The decision with one more job, as many tokens of it as fit, and without what stands in its way."""
    evict = [other for other in decision.evict if other is not job]
    run = [(other, size) for other, size in decision.run if other is not job]
    del run[view.max_batch - 1 :]
    used = sum([size for _, size in run])
    size = max(1, min(job.num_left, view.token_budget - used))
    while run and used + size > view.token_budget:
        used -= run.pop()[1]
    free = sum([view.releases(other) for other in evict], view.free_pages)
    youngest = [
        other for other in reversed(table.residents) if other is not job and other not in evict
    ]
    num_new = sum([not other.is_resident for other, _ in run]) + (not job.is_resident)

    def lacks() -> bool:
        taken = sum([view.pages(other, each) for other, each in run], view.pages(job, size))
        return taken > free or num_new > view.free_rows + len(evict)

    while lacks() and youngest:
        victim = youngest.pop(0)
        evict.append(victim)
        free += view.releases(victim)
        run = [(other, each) for other, each in run if other is not victim]
    while run and sum([each == other.num_left for other, each in run]) >= view.max_draws:
        other, _ = run.pop()
        num_new -= not other.is_resident
    while lacks() and run:
        other, _ = run.pop()
        num_new -= not other.is_resident
    while lacks() and size > 1:
        size //= 2
    return Decision([(job, size), *run], evict)
