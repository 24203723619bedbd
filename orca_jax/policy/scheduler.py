"""The scheduler of a policy from outside: it shows the policy a view, and checks and applies its decision."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from operator import index
from typing import Any, ClassVar

from orca_jax.policy.errors import PolicyError, calling, number_of
from orca_jax.policy.guard import Guard
from orca_jax.policy.jobs import JobTable, PolicyRequest
from orca_jax.policy.ordered import OutsideOrdering
from orca_jax.policy.protocol import Decision, Order, Policy, RequestView
from orca_jax.sched.blocks import BlockCount, count_of
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.joint import PreemptingScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefixes.cache import NO_HIT
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Choice, MeasuredSeconds, Selection, unknown_seconds
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import Traits

SLOW_SECONDS = 0.01
"""A decision that takes longer is counted as slow, and the first one is logged."""
LONGEST_WAKE = 5.0
"""The highest `wake_after`, in seconds: an engine that does nothing for twice as long counts as hung."""

logger = logging.getLogger(__name__)


class LiveView:
    """`policy.PolicyView` over pool and KV cache. Its methods take jobs of this engine alone."""

    def __init__(
        self, scheduler: "PolicyScheduler", table: JobTable, pool: RequestPool, kv: KVManager
    ) -> None:
        num_running = len(pool.running)
        num_live = min(len(pool), scheduler.num_rows)
        self.now = pool.now
        self.max_batch = scheduler.max_bs
        self.max_draws = min(scheduler.max_bs, ceil_div(num_live, scheduler.num_stages))
        self.token_budget = scheduler.token_budget
        self.free_rows = min(scheduler.num_rows - num_running, kv.num_free_rows)
        self.free_pages = kv.num_free_blocks
        self.num_pages = count_of(kv.num_blocks)
        self.residents: Sequence[RequestView] = table.residents
        self._scheduler = scheduler
        self._table = table
        self._pool = pool
        self._kv = kv
        self._ordered: tuple[Decision, Sequence[Choice]] | None = None

    @property
    def waiting(self) -> Iterable[PolicyRequest]:
        return self._table.waiting()

    def pages(self, job: Any, num_tokens: int) -> BlockCount:
        request = job.request
        kv = self._kv
        row = request.row
        start = request.num_computed
        if row is None:
            return self._pages_of_newcomer(job, num_tokens)
        lacking = kv.lacking(row, start + num_tokens)
        if kv.has_windows:
            return lacking - kv.behind(row, start)
        return lacking

    def most_pages(self, num_tokens: int, num_jobs: int) -> BlockCount:
        pages = num_jobs + ceil_div(num_tokens, self._kv.page_size)
        return pages * self._kv.of_page

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
        new = 0 * free
        for job, size in run if newcomers else ():
            if job in newcomers:
                new += self.pages(job, size)
        if not new + self.most_pages(num_tokens, len(run)) > free:
            return None
        taken = sum([self.pages(*each) for each in run], 0 * free)
        if taken > free:
            return taken
        return None

    def use_whole_pages(self, job: Any) -> None:
        if job.request.row is None:
            self._table.drop_copy(job, self._kv.page_size)

    def releases(self, job: Any) -> BlockCount:
        return self._kv.releasable(job.request.row)

    def seconds(self, work: Sequence[tuple[RequestView, int]]) -> float:
        members = []
        for job, size in work:
            is_increment = size == 1 and job.num_computed >= job.num_prompt
            members.append((job.num_computed or job.num_cached, size, is_increment))
        return self._scheduler.seconds(members)

    def in_order(self, order: Order, watermark: BlockCount = 0) -> Decision:
        table = self._table
        selection = self._scheduler.chunked(order, watermark).select(self._pool, self._kv)
        jobs = table.jobs
        choices = selection.choices
        for request, _, _, hit in choices:
            if request.row is None:
                table.take_newcomer(jobs[request], hit)
        run = tuple([(jobs[request], size) for request, size, _, _ in choices])
        decision = Decision(run, [jobs[request] for request in selection.preempted])
        if not selection.preempted:
            self._ordered = decision, choices
        return decision

    def choices_of(self, decision: object) -> Sequence[Choice] | None:
        """The choices of a decision of `in_order` without evictions, which need no check; None for any other one."""
        if self._ordered is None or self._ordered[0] is not decision:
            return None
        return self._ordered[1]


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
        clock: measures the time of decisions.
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
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.name = self.name or type(self.policy).__name__
        self.guard = Guard(self.name)
        self._has_warned = False
        self._table = JobTable(self.num_stages)
        self._order: Order | None = None  # the latest one that it decided in
        self._chunked: ChunkedScheduler | None = None

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Ask the policy, and apply its decision as a whole.

        Raises:
            PolicyError: it raised an exception, or the decision cannot be applied.
        """
        table = self._table
        ended = table.begin(pool)
        with calling(self.name, "ended"):
            for job in ended:
                self.policy.ended(job)
        view = LiveView(self, table, pool, kv)
        start = self.clock()
        with calling(self.name, "decide"):
            answer = self.policy.decide(view)
        is_slow = self._is_slow(self.clock() - start)
        choices = view.choices_of(answer)
        newcomers: Set[Any] = frozenset()
        wanted = answer
        if choices is None:
            wanted = self._read(answer)
            newcomers = self._newcomers(wanted)
        decision = self.guard.overrule(wanted, view, table, pool)
        is_overruled = decision is not wanted
        if is_overruled:
            newcomers = self._newcomers(decision)
        if is_overruled or choices is None:
            decision, choices = self._applied(decision, newcomers, view, kv)
        run: Sequence[tuple[Any, int]] = decision.run
        evict: Sequence[Any] = decision.evict
        for job in evict:
            job.num_evictions += 1
        started = self.policy.started
        with calling(self.name, "started"):
            for job, size in run:
                started(job, size)
        return Selection(
            choices,
            [job.request for job in evict],
            is_overruled=is_overruled,
            is_slow=is_slow,
            wake_after=None if choices else decision.wake_after,
        )

    def chunked(self, order: Order, watermark: BlockCount) -> ChunkedScheduler:
        """The scheduler that decides in an order; it is made again for another order."""
        if self._chunked is None or order is not self._order:
            self._order = order
            kind = PreemptingScheduler if order.preempts else ChunkedScheduler
            self._chunked = kind(
                self.max_bs,
                self.token_budget,
                OutsideOrdering(order, self._table.jobs.__getitem__),
                num_stages=self.num_stages,
                num_rows=self.num_rows,
                awaits_chosen=False,
            )
        self._chunked.watermark = watermark
        return self._chunked

    def may_return(self, request: Request) -> bool:
        """Always true: a token is delivered as soon as its iteration has returned."""
        return True

    def _applied(
        self, decision: Decision, newcomers: Set[Any], view: LiveView, kv: KVManager
    ) -> tuple[Decision, Sequence[Choice]]:
        """A decision as it can be applied, and its choices. Raises PolicyError for one that is beyond the limits."""
        if newcomers and decision.evict:
            decision, newcomers = self._in_turn(decision, newcomers, kv)
        self._check(decision, newcomers, view)
        run: Sequence[tuple[Any, int]] = decision.run
        if newcomers or kv.states is not None:
            return decision, [self._choice(job, size, kv) for job, size in run]
        # quick
        return decision, [
            tuple.__new__(Choice, (job.request, size, (), NO_HIT)) for job, size in run
        ]

    def _choice(self, job: PolicyRequest, num_tokens: int, kv: KVManager) -> Choice:
        request = job.request
        hit = NO_HIT
        start = request.num_computed
        if request.row is None:
            hit = self._table.hit_of(job)
            start = hit.num_tokens
            job.admitted_with = len(request.generated_ids)
        if kv.states is not None:
            num_tokens = kv.states.chunk(request.row, start, num_tokens, len(request.prompt_ids))
        return Choice(request, num_tokens, (), hit)

    def _is_slow(self, seconds: float) -> bool:
        if seconds < SLOW_SECONDS:
            return False
        if not self._has_warned:
            logger.warning(
                "%s: a decision took %.0f ms; each iteration waits for it", self.name, 1e3 * seconds
            )
        self._has_warned = True
        return True

    def _refuse(self, problem: str) -> PolicyError:
        return PolicyError(self.name, problem)

    def _read(self, answer: object) -> Decision:
        """The decision with Python's own numbers: those of other libraries cannot be sent to other processes."""
        if not isinstance(answer, Decision):
            raise self._refuse(f"decide returned {type(answer).__name__} instead of a Decision")
        run = answer.run
        try:
            len(run)  # a generator has none
            if any([type(size) is not int for _, size in run]):
                answer = answer._replace(run=[(job, int(index(size))) for job, size in run])
        except (TypeError, ValueError) as error:
            raise self._unfit(error) from error
        if answer.wake_after is None:
            return answer
        if run:
            raise self._refuse("wake_after is given together with jobs to run")
        return answer._replace(wake_after=self._wake_of(answer.wake_after))

    def _wake_of(self, wake_after: object) -> float:
        seconds = number_of(wake_after)
        if 0 <= seconds <= LONGEST_WAKE:  # false for nan
            return seconds
        raise self._refuse(
            f"wake_after must be from 0 to {LONGEST_WAKE:g} seconds, got {wake_after!r}"
        )

    def _unfit(self, error: Exception) -> PolicyError:
        return self._refuse(f"`run` needs pairs of a job and its tokens, and `evict` jobs: {error}")

    def _newcomers(self, decision: Decision) -> Set[Any]:
        """The jobs of a decision that have no row yet. Refuse what is not a decision about live jobs of this engine."""
        run = decision.run
        evict = decision.evict
        try:
            jobs = {job for job, _ in run}
            count = len(run)
            named = jobs.union(evict) if evict else jobs
        except (TypeError, ValueError) as error:
            raise self._unfit(error) from error
        strangers = named.difference(self._table.with_rows)
        for job in strangers:
            if not self._table.is_live(job):
                raise self._refuse(
                    f"{job!r} has ended, or was never seen; drop jobs when `ended` is called"
                )
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

    def _in_turn(
        self, decision: Decision, newcomers: Set[Any], kv: KVManager
    ) -> tuple[Decision, Set[Any]]:
        """Leave out newcomers that reuse pages of an evicted job, until the next decision.

        Such a page counts as free, since its job gives it back, and as one that the newcomer does not take.
        """
        evict: Sequence[Any] = decision.evict
        held = [kv.blocks_of(job.request.row) for job in evict]
        late = {job for job in newcomers if any(map(self._table.hit_of(job).reuses, held))}
        return decision._replace(
            run=[each for each in decision.run if each[0] not in late]
        ), newcomers - late

    def _check(self, decision: Decision, newcomers: Set[Any], view: LiveView) -> None:
        """Refuse a decision beyond the limits of the view."""
        run = decision.run
        evict = decision.evict
        num_tokens = num_draws = 0
        jobs: Sequence[tuple[Any, int]] = run
        for job, size in jobs:
            # that of a resident is read without a call
            left = job.num_left if job.left is None else job.left
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
