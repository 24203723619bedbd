"""Policies for tests: jobs take turns."""

from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView
from orca_jax.values.request import URGENCY_FIELDS


class Turns:
    """The fewest generated tokens first; a resident that has more of them is paused."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = True

    def started(self, job: RequestView, num_tokens: int) -> None:
        pass

    def ended(self, job: RequestView) -> None:
        pass

    def decide(self, view: PolicyView) -> Decision:
        run: list[tuple[RequestView, int]] = []
        free, budget, rows, draws = view.free_pages, view.token_budget, view.free_rows, 0
        for job in sorted(
            [*view.residents, *view.waiting], key=lambda job: (job.num_generated, job.index)
        ):
            size = min(job.num_left, budget)
            if not size or len(run) == view.max_batch or (not job.is_resident and not rows):
                continue
            if view.pages(job, size) > free or (size == job.num_left and draws == view.max_draws):
                continue
            run.append((job, size))
            free -= view.pages(job, size)
            budget -= size
            rows -= not job.is_resident
            draws += size == job.num_left
        return Decision(run)


class Reading(Turns):
    """A policy that reads all that callers give."""

    reads: ClassVar[frozenset[str]] = frozenset(URGENCY_FIELDS)


class ByTenant:
    """An order that says nothing about what it reads."""

    api: ClassVar[int] = API
    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = True

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        return (float(len(job.tenant)),)


class ByProgram(ByTenant):
    """An order that names what it reads."""

    reads: ClassVar[frozenset[str]] = frozenset({"program"})
