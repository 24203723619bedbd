"""vLLM's first scheduler (0.1; Kwon et al., SOSP'23, section 4.5): whole prompts first, pages on demand, preemption.

While a waiting request fits, an iteration has new prompts alone, and every running request waits. Otherwise each
running request gets one token. If no page is free, the latest request loses its pages, and computes its tokens again
later. Requests come in the order of arrival.
"""

from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class PrefillFirst:
    """Prompts before increments, both in order of arrival.

    Args:
        most_tokens: prompt tokens of an iteration, vLLM's `max_num_batched_tokens` of that time; a longer prompt comes
            alone.
        watermark: new requests leave one page in so many free.
        in_flight: iterations in flight; the residents are shared equally among them, as among vLLM's engines of a
            pipeline.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = False

    def __init__(self, most_tokens: int = 2560, watermark: int = 100, in_flight: int = 1) -> None:
        self._most_tokens = most_tokens
        self._watermark = watermark
        self._in_flight = in_flight

    def decide(self, view: PolicyView) -> Decision:
        """New prompts; without any, increments."""
        newcomers = self._newcomers(view)
        return Decision(newcomers) if newcomers else self._increments(view)

    def _newcomers(self, view: PolicyView) -> list[tuple[RequestView, int]]:
        """Waiting jobs, as far as rows, pages and tokens reach."""
        run: list[tuple[RequestView, int]] = []
        spare = view.free_pages
        num_tokens = 0
        kept = bool(view.residents) * view.num_pages
        places = min(view.max_draws, view.free_rows)
        most = min(self._most_tokens, view.token_budget)
        for job in view.waiting:
            size = min(job.num_left, view.token_budget)
            num_tokens += size
            pages = view.pages(job, size)
            if not size or len(run) == places or (run and num_tokens > most):
                break
            if pages > spare or kept > self._watermark * (spare - pages):
                break
            spare -= pages
            run.append((job, size))
        return run

    def _increments(self, view: PolicyView) -> Decision:
        """A token for each resident that is not in flight, and the residents to evict for their pages.

        A prompt longer than the budget of the engine goes on here.
        """
        ready = sorted(
            [job for job in view.residents if job.num_left and not job.num_pending],
            key=lambda job: job.index,
        )
        most = min(view.max_draws, -(-len(view.residents) // self._in_flight))
        free = view.free_pages
        run: list[tuple[RequestView, int]] = []
        evict: list[RequestView] = []
        budget = view.token_budget
        while ready and len(run) < most and budget:
            job = ready.pop(0)
            size = min(job.num_left, budget)
            while (pages := view.pages(job, size)) > free:
                evict.append(ready.pop() if ready else job)
                free += view.releases(evict[-1])
                if evict[-1] is job:
                    break
            else:
                free = free - pages
                budget = budget - size
                run.append((job, size))
        return Decision(run, evict)

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: each decision reads all jobs anew."""

    def ended(self, job: RequestView) -> None:
        """Does nothing: each decision reads all jobs anew."""
