"""A policy for tests: jobs take turns."""

from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


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
        for job in sorted([*view.residents, *view.waiting], key=lambda job: (job.num_generated, job.index)):
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
