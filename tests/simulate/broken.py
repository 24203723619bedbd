"""Ten policies, each with one fault."""

from collections.abc import Iterable
from contextlib import suppress
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class Sound:
    """First come, first served, with as many tokens as fit."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = False

    def decide(self, view: PolicyView) -> Decision:
        return Decision(fitting(view, [*view.residents, *view.waiting]))

    def started(self, job: RequestView, num_tokens: int) -> None:
        pass

    def ended(self, job: RequestView) -> None:
        pass


def fitting(view: PolicyView, jobs: Iterable[RequestView]) -> list[tuple[RequestView, int]]:
    """The first jobs that fit; those that come later get pages to their ends only after those before."""
    run, free, budget, rows, draws = [], view.free_pages, view.token_budget, view.free_rows, 0
    for job in jobs:
        size = min(job.num_left, budget)
        to_come = view.pages(
            job, job.num_prompt + job.max_tokens - max(job.num_computed, job.num_cached)
        )
        if not size or len(run) == view.max_batch or draws == view.max_draws or to_come > free:
            free = free - to_come if job.is_resident else free
            continue
        if not job.is_resident and not rows:
            continue
        free -= to_come
        budget -= size
        rows -= not job.is_resident
        draws += size == job.num_left
        run.append((job, size))
    return run


class TwiceTheSame(Sound):
    def decide(self, view: PolicyView) -> Decision:
        run = super().decide(view).run
        return Decision([*run, *run[:1]])


class Ended(Sound):
    def __init__(self) -> None:
        self.gone: list[RequestView] = []

    def decide(self, view: PolicyView) -> Decision:
        return Decision([(job, 1) for job in self.gone]) if self.gone else super().decide(view)

    def ended(self, job: RequestView) -> None:
        self.gone.append(job)


class Forgets(Sound):
    """A job whose prompt took two iterations is lost."""

    def __init__(self) -> None:
        self.seen: dict[RequestView, int] = {}

    def decide(self, view: PolicyView) -> Decision:
        return Decision(
            [(job, size) for job, size in super().decide(view).run if self.seen.get(job, 0) < 3]
        )

    def started(self, job: RequestView, num_tokens: int) -> None:
        self.seen[job] = self.seen.get(job, 0) + 1


class Starves(Sound):
    """The newest first; residents are never paused."""

    def decide(self, view: PolicyView) -> Decision:
        return Decision(fitting(view, [*view.residents, *list(view.waiting)[::-1]]))


class Raises(Sound):
    def decide(self, view: PolicyView) -> Decision:
        return (
            Decision([(view.residents[7], 1)]) if len(view.residents) > 1 else super().decide(view)
        )


class Loops(Sound):
    def decide(self, view: PolicyView) -> Decision:
        while len(view.residents) > 1:
            with suppress(Exception):  # it must not stop the check
                pass
        return super().decide(view)


class TooManyPages(Sound):
    def decide(self, view: PolicyView) -> Decision:
        run: list[tuple[RequestView, int]] = []
        for job in [*view.residents, *list(view.waiting)[: view.free_rows]]:
            size = min(job.num_left, view.token_budget - sum(size for _, size in run))
            if size and len(run) < view.max_batch:
                run.append((job, size))
        return Decision(run)


class OverBudget(Sound):
    def decide(self, view: PolicyView) -> Decision:
        return Decision([(job, job.num_left) for job, _ in super().decide(view).run])


class EvictsAndRuns(Sound):
    def decide(self, view: PolicyView) -> Decision:
        run = super().decide(view).run
        return Decision(run, [job for job, _ in run[1:] if job.is_resident and len(run) == 2])


class Empty(Sound):
    def decide(self, view: PolicyView) -> Decision:
        return Decision([], (), 0.001)


class Silent(Sound):
    def decide(self, view: PolicyView) -> Decision:
        return Decision([])
