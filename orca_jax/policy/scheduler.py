"""The scheduler of a policy from outside: it shows the policy a view, and checks and applies its decision."""

import logging
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from operator import index
from typing import Any, ClassVar

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
    """`policy.PolicyView` over pool and KV cache. Its methods take jobs of this engine alone."""

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
    def waiting(self) -> Iterable[PolicyRequest]:
        return self._table.waiting()

    def pages(self, job: Any, num_tokens: int) -> BlockCount:
        request, kv = job.request, self._kv
        row, start = request.row, request.num_computed
        if row is None:
            return self._pages_of_newcomer(job, num_tokens)
        lacking = kv.lacking(row, start + num_tokens)
        return lacking - kv.behind(row, start) if kv.has_windows else lacking

    def most_pages(self, num_tokens: int, num_jobs: int) -> BlockCount:
        return (num_jobs - -num_tokens // self._kv.page_size) * self._kv.of_page

    def _pages_of_newcomer(self, job: Any, num_tokens: int) -> BlockCount:
        hit = self._table.hit_of(job)
        needed = self._kv.needed(hit, hit.num_tokens + num_tokens)
        if hit.sources and needed > self.free_pages:  # the source of the copy would be one too many
            self.use_whole_pages(job)
            hit = self._table.hit_of(job)
            needed = self._kv.needed(hit, hit.num_tokens + num_tokens)
        return needed

    def lack(
        self, run: Sequence[tuple[Any, int]], newcomers: Set[Any], num_tokens: int, free: BlockCount
    ) -> BlockCount | None:
        """The pages that a decision with so many tokens takes, if they are more than `free`."""
        new = sum([self.pages(job, size) for job, size in run if job in newcomers], 0 * free) if newcomers else 0
        if not new + self.most_pages(num_tokens, len(run)) > free:
            return None
        taken = sum([self.pages(*each) for each in run], 0 * free)
        return taken if taken > free else None

    def use_whole_pages(self, job: Any) -> None:
        if job.request.row is None:
            self._table.drop_copy(job, self._kv.page_size)

    def releases(self, job: Any) -> BlockCount:
        return self._kv.releasable(job.request.row)

    def seconds(self, work: Sequence[tuple[RequestView, int]]) -> float:
        return self._seconds(
            [
                (job.num_computed or job.num_cached, size, size == 1 and job.num_computed >= job.num_prompt)
                for job, size in work
            ]
        )


@dataclass(eq=False)
class PolicyScheduler:
    """A scheduler that asks a policy.

    Args:
        policy: decides.
        name: name of the policy, for errors; empty: that of its class.
        max_bs: most requests of an iteration.
        token_budget: most tokens of an iteration.
        num_rows: most requests with a row.
        n_workers: iterations in flight.
        num_stages: devices in the pipeline.
        seconds: expected seconds of an iteration.
    """

    traits: ClassVar[Traits] = Traits(shares_prefixes=True, has_token_budget=True, has_overlap=True)

    policy: Policy
    name: str = ""
    _: KW_ONLY
    max_bs: int
    token_budget: int
    num_rows: int
    n_workers: int = 1
    num_stages: int = 1
    seconds: MeasuredSeconds = unknown_seconds

    def __post_init__(self) -> None:
        self.name = self.name or type(self.policy).__name__
        self.guard = Guard(self.name)
        self._has_warned = False
        self._table = JobTable(self.num_stages)

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Ask the policy, and apply its decision as a whole.

        Raises:
            PolicyError: it raised an exception, or the decision cannot be applied.
        """
        table = self._table
        ended = table.begin(pool)
        try:
            for job in ended:
                self.policy.ended(job)
        except Exception as error:
            raise self._raised("ended", error) from error
        view = LiveView(self, table, pool, kv)
        start = time.perf_counter()
        try:
            wanted = self.policy.decide(view)
        except Exception as error:
            raise self._raised("decide", error) from error
        is_slow = self._is_slow(time.perf_counter() - start)
        newcomers = self._newcomers(wanted)
        decision = self.guard.overrule(wanted, view, table, pool)
        if is_overruled := decision is not wanted:
            newcomers = self._newcomers(decision)
        if newcomers and decision.evict:
            decision, newcomers = self._in_turn(decision, newcomers, kv)
        self._check(decision, newcomers, view)
        run: Sequence[tuple[Any, int]] = decision.run
        evict: Sequence[Any] = decision.evict
        if newcomers or kv.states is not None:
            choices = [self._choice(job, size, kv) for job, size in run]
        else:
            choices = [tuple.__new__(Choice, (job.request, size, (), NO_HIT)) for job, size in run]  # quick
        for job in evict:
            job.num_evictions += 1
        started = self.policy.started
        try:
            for job, size in run:
                started(job, size)
        except Exception as error:
            raise self._raised("started", error) from error
        return Selection(
            choices,
            [job.request for job in evict],
            is_overruled=is_overruled,
            is_slow=is_slow,
            wake_after=None if choices else decision.wake_after,
        )

    def may_return(self, request: Request) -> bool:
        """Always true: a token is delivered as soon as its iteration has returned."""
        return True

    def _choice(self, job: PolicyRequest, num_tokens: int, kv: KVManager) -> Choice:
        request, hit = job.request, NO_HIT
        start = request.num_computed
        if request.row is None:
            hit = self._table.hit_of(job)
            start = hit.num_tokens
            job.admitted_with = len(request.generated_ids)
        if kv.states is not None:
            num_tokens = kv.states.chunk(request.row, start, num_tokens, len(request.prompt_ids))
        return Choice(request, num_tokens, (), hit)

    def _raised(self, method: str, error: Exception) -> PolicyError:
        """The error for an exception of the policy; it names the last line."""
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        at = f" at line {place.tb_lineno}" if place is not None else ""
        return PolicyError(f"{self.name}: {method} raised {type(error).__name__}: {error}{at}")

    def _is_slow(self, seconds: float) -> bool:
        if seconds < SLOW_SECONDS:
            return False
        if not self._has_warned:
            logger.warning("%s: a decision took %.0f ms; each iteration waits for it", self.name, 1e3 * seconds)
        self._has_warned = True
        return True

    def _refuse(self, problem: str) -> PolicyError:
        return PolicyError(f"{self.name}: {problem}")

    def _newcomers(self, decision: object) -> Set[Any]:
        """The jobs of a decision that have no row yet. Refuse what is not a decision about live jobs of this engine."""
        if not isinstance(decision, Decision):
            raise self._refuse(f"decide returned {type(decision).__name__} instead of a Decision")
        run, evict = decision.run, decision.evict
        try:
            jobs, count = {job for job, _ in run}, len(run)
            index(sum([size for _, size in run]))  # one that is not whole raises an exception
            named = jobs.union(evict) if evict else jobs
        except (TypeError, ValueError) as error:
            raise self._refuse(f"`run` needs pairs of a job and its tokens, and `evict` jobs: {error}") from error
        strangers = named.difference(self._table.with_rows)
        for job in strangers:
            if not self._table.is_live(job):
                raise self._refuse(f"{job!r} has ended, or was never seen; drop jobs when `ended` is called")
        if decision.wake_after is not None and run:
            raise self._refuse("wake_after is given together with jobs to run")
        if len(jobs) < count:
            raise self._refuse(f"{_twice([job for job, _ in run])!r} is in the decision twice")
        if evict:
            if len(set(evict)) < len(evict):
                raise self._refuse(f"{_twice(evict)!r} is in the decision twice")
            for job in evict:
                if job in strangers:
                    raise self._refuse(f"{job!r} is evicted and has no row")
                if job in jobs:
                    raise self._refuse(f"{job!r} is run and evicted")
        return strangers

    def _in_turn(self, decision: Decision, newcomers: Set[Any], kv: KVManager) -> tuple[Decision, Set[Any]]:
        """Leave out newcomers that reuse pages of an evicted job, until the next decision.

        Such a page counts as free, since its job gives it back, and as one that the newcomer does not take.
        """
        evict: Sequence[Any] = decision.evict
        held = [kv.blocks_of(job.request.row) for job in evict]
        late = {job for job in newcomers if any(map(self._table.hit_of(job).reuses, held))}
        return decision._replace(run=[each for each in decision.run if each[0] not in late]), newcomers - late

    def _check(self, decision: Decision, newcomers: Set[Any], view: LiveView) -> None:
        """Refuse a decision beyond the limits of the view."""
        run, evict = decision.run, decision.evict
        num_tokens = num_draws = 0
        jobs: Sequence[tuple[Any, int]] = run
        for job, size in jobs:
            left = job.num_left if job.left is None else job.left  # that of a resident is read without a call
            if not 1 <= size <= left:
                raise self._refuse(f"{job!r} runs with {size} tokens, and num_left is {left}")
            num_tokens += size
            num_draws += size == left
        for what, number, most in (
            ("jobs", len(run), view.max_batch),
            ("tokens", num_tokens, view.token_budget),
            ("newcomers", len(newcomers), view.free_rows + len(evict)),
            ("jobs that draw a token", num_draws, view.max_draws),
        ):
            if number > most:
                raise self._refuse(f"{number} {what} in one iteration, and the limit is {most}")
        free = sum([view.releases(job) for job in evict], view.free_pages)
        if (taken := view.lack(run, newcomers, num_tokens, free)) is not None:
            raise self._refuse(f"the decision takes {taken} pages, and {free} are free")


def _twice(jobs: Sequence[Any]) -> Any:
    return next(job for job in jobs if jobs.count(job) > 1)
