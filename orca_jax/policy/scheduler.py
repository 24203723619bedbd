"""The scheduler of a policy from outside: it shows the policy a view, and checks and applies its decision."""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

from orca_jax.errors import EngineError
from orca_jax.policy.guard import Guard
from orca_jax.policy.jobs import JobTable, PolicyRequest
from orca_jax.policy.protocol import Decision, Policy, RequestView
from orca_jax.sched.blocks import BlockCount, count_of
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefix import NO_HIT
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Choice, MeasuredSeconds, Selection, Traits, unknown_seconds

SLOW_SECONDS = 0.01
"""A decision that takes longer is counted as slow, and the first one is logged."""

logger = logging.getLogger(__name__)


class PolicyError(EngineError):
    """A policy raised an exception or returned a decision that cannot be applied; the message names it."""


class LiveView:
    """`policy.PolicyView` over pool and KV cache."""

    def __init__(self, scheduler: "PolicyScheduler", table: JobTable, pool: RequestPool, kv: KVManager) -> None:
        num_running, num_live = len(pool.running), min(len(pool), scheduler.num_rows)
        self.now = pool.now
        self.max_batch = scheduler.max_bs
        self.max_draws = min(scheduler.max_bs, -(-num_live // scheduler.num_stages))
        self.token_budget = scheduler.token_budget
        self.free_rows = min(scheduler.num_rows - num_running, kv.num_free_rows)
        self.free_pages = kv.num_free_blocks
        self.num_pages = count_of(kv.num_blocks)
        self.residents: Sequence[RequestView] = table.residents
        self._table, self._kv, self._seconds = table, kv, scheduler.seconds

    @property
    def waiting(self) -> Iterable[RequestView]:
        return self._table.waiting()

    def pages(self, job: RequestView, num_tokens: int) -> BlockCount:
        assert isinstance(job, PolicyRequest), f"{job!r} is not a job of this engine"
        request, kv = job.request, self._kv
        if request.row is None:
            hit = self._table.hit_of(job)
            needed = kv.needed(hit, hit.num_tokens + num_tokens)
            if hit.sources and needed > self.free_pages:  # the source of the copy would be one too many
                self.use_whole_pages(job)
                hit = self._table.hit_of(job)
                needed = kv.needed(hit, hit.num_tokens + num_tokens)
            return needed
        lacking = kv.lacking(request.row, request.num_computed + num_tokens)
        return lacking - kv.behind(request.row, request.num_computed) if kv.has_windows else lacking

    def use_whole_pages(self, job: RequestView) -> None:
        assert isinstance(job, PolicyRequest), f"{job!r} is not a job of this engine"
        if job.request.row is None:
            self._table.drop_copy(job, self._kv.page_size)

    def releases(self, job: RequestView) -> BlockCount:
        assert isinstance(job, PolicyRequest), f"{job!r} is not a job of this engine"
        return self._kv.releasable(job.request.row)

    def seconds(self, work: Sequence[tuple[RequestView, int]]) -> float:
        return self._seconds(
            [
                (job.num_computed or job.num_cached, size, size == 1 and job.num_computed >= job.num_prompt)
                for job, size in work
            ]
        )


class PolicyScheduler:
    """A scheduler that asks a policy.

    Args:
        policy: decides.
        name: name of the policy, for errors.
        max_bs: most requests of an iteration.
        token_budget: most tokens of an iteration.
        num_rows: most requests with a row.
        depth: iterations in flight.
        num_stages: devices in the pipeline.
        seconds: expected seconds of an iteration.
    """

    traits: ClassVar[Traits] = Traits(shares_prefixes=True, has_token_budget=True, has_overlap=True)

    def __init__(
        self,
        policy: Policy,
        name: str,
        *,
        max_bs: int,
        token_budget: int,
        num_rows: int,
        depth: int = 1,
        num_stages: int = 1,
        seconds: MeasuredSeconds = unknown_seconds,
    ) -> None:
        self.policy = policy
        self.name = name
        self.max_bs = max_bs
        self.token_budget = token_budget
        self.num_rows = num_rows
        self.n_workers = depth
        self.num_stages = num_stages
        self.seconds = seconds
        self.guard = Guard(name)
        self._has_warned = False
        self._table = JobTable(num_stages)

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Ask the policy, and apply its decision as a whole.

        Raises:
            PolicyError: it raised an exception, or the decision cannot be applied.
        """
        for ended in self._table.begin(pool, pool.now):
            self._call("ended", ended)
        view = LiveView(self, self._table, pool, kv)
        start = time.thread_time()
        wanted = self._formed(self._call("decide", view))
        is_slow = self._is_slow(time.thread_time() - start)
        decision = self.guard.overrule(wanted, view, self._table, pool)
        self._check(decision, view)
        choices = []
        for job, num_tokens in decision.run:
            choices.append(self._choice(job, num_tokens, kv))
        evicted = [self._evicted(job) for job in decision.evict]
        for job, num_tokens in decision.run:
            self._call("started", job, num_tokens)
        return Selection(
            choices,
            evicted,
            is_overruled=decision is not wanted,
            is_slow=is_slow,
            wake_after=None if choices else decision.wake_after,
        )

    def may_return(self, request: Request) -> bool:
        """Always true: a token is delivered as soon as its iteration has returned."""
        return True

    def _choice(self, job: RequestView, num_tokens: int, kv: KVManager) -> Choice:
        assert isinstance(job, PolicyRequest), "it was checked"
        request = job.request
        hit, start = NO_HIT, request.num_computed
        if request.row is None:
            hit = self._table.hit_of(job)
            start = hit.num_tokens
            job.admitted_with = len(request.generated_ids)
        if kv.states is not None:
            num_tokens = kv.states.chunk(request.row, start, num_tokens, len(request.prompt_ids))
        return Choice(request, num_tokens) if hit is NO_HIT else Choice(request, num_tokens, (), hit)

    def _evicted(self, job: RequestView) -> Request:
        assert isinstance(job, PolicyRequest), "it was checked"
        job.num_evictions += 1
        return job.request

    def _call(self, method: str, *args: object) -> object:
        """Call a method of the policy. Its exceptions become a PolicyError."""
        try:
            return getattr(self.policy, method)(*args)
        except Exception as error:
            place = error.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            at = f" at line {place.tb_lineno}" if place is not None else ""
            raise PolicyError(f"{self.name}: {method} raised {type(error).__name__}: {error}{at}") from error

    def _is_slow(self, seconds: float) -> bool:
        if seconds < SLOW_SECONDS:
            return False
        if not self._has_warned:
            logger.warning("%s: a decision took %.0f ms; each iteration waits for it", self.name, 1e3 * seconds)
        self._has_warned = True
        return True

    def _refuse(self, problem: str) -> PolicyError:
        return PolicyError(f"{self.name}: {problem}")

    def _formed(self, decision: object) -> Decision:
        if not isinstance(decision, Decision):
            raise self._refuse(f"decide returned {type(decision).__name__} instead of a Decision")
        for job in (*(job for job, _ in decision.run), *decision.evict):
            if not self._table.is_live(job):
                raise self._refuse(f"{job!r} has ended, or was never seen; drop jobs when `ended` is called")
        if decision.wake_after is not None and decision.run:
            raise self._refuse("wake_after is given together with jobs to run")
        return decision

    def _check(self, decision: Decision, view: LiveView) -> None:
        """Refuse a decision that cannot be applied."""
        run, evicted = decision.run, {job.index for job in decision.evict}
        jobs = [job for job, _ in run]
        for each in (jobs, decision.evict):
            if len(set(each)) < len(each):
                twice = next(job for job in each if each.count(job) > 1)
                raise self._refuse(f"{twice!r} is in the decision twice")
        for job in decision.evict:
            if not job.is_resident:
                raise self._refuse(f"{job!r} is evicted and has no row")
        newcomers = draws = 0
        for job, size in run:
            left = job.num_left
            if evicted and job.index in evicted:
                raise self._refuse(f"{job!r} is run and evicted")
            if not 1 <= size <= left:
                raise self._refuse(f"{job!r} runs with {size} tokens, and num_left is {left}")
            newcomers += not job.is_resident
            draws += size == left
        for what, number, most in (
            ("jobs", len(run), view.max_batch),
            ("tokens", sum([size for _, size in run]), view.token_budget),
            ("newcomers", newcomers, view.free_rows + len(evicted)),
            ("jobs that draw a token", draws, view.max_draws),
        ):
            if number > most:
                raise self._refuse(f"{number} {what} in one iteration, and the limit is {most}")
        taken = sum([view.pages(job, size) for job, size in run], 0 * view.free_pages)
        free = sum([view.releases(job) for job in decision.evict], view.free_pages)
        if taken > free:
            raise self._refuse(f"the decision takes {taken} pages, and {free} are free")
