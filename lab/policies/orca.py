"""ORCA's iteration-level scheduling with a bound on tokens (Yu et al., OSDI'22, section 4.2, Algorithm 1).

Each iteration has the first requests in the order of arrival, prompts whole and beside increments. A request is
admitted only if all the tokens that it may have fit into memory. The bound on the tokens of an iteration is not in the
paper; it is part of the definition of ORCA in analyses of its stability (Li, Dai and Peng, arXiv 2504.07347).
"""

from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class Orca:
    """Whole prompts beside increments, by arrival."""

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = False

    def decide(self, view: PolicyView) -> Decision:
        """The residents, then waiting jobs as far as rows, budget and memory reach."""
        run: list[tuple[RequestView, int]] = []
        rows = view.free_rows
        budget = view.token_budget
        spare = view.free_pages
        draws = view.max_draws
        for job in view.residents:
            spare -= view.pages(job, self._to_come(job))
            if job.num_left and job.num_left <= budget and draws:
                run.append((job, job.num_left))
                budget = budget - job.num_left
                draws -= 1
        for job in view.waiting if budget and draws and rows else ():
            pages = view.pages(job, self._to_come(job))
            if not rows or not draws or job.num_left > budget or pages > spare:
                break
            run.append((job, job.num_left))
            rows -= 1
            budget = budget - job.num_left
            spare = spare - pages
            draws -= 1
        return Decision(run)

    def _to_come(self, job: RequestView) -> int:
        return job.num_prompt + job.max_tokens - job.num_computed

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: each decision reads all jobs anew."""

    def ended(self, job: RequestView) -> None:
        """Does nothing: each decision reads all jobs anew."""
