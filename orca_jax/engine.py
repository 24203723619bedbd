"""The engine: Algorithm 1 of the paper around a scheduler and an executor."""

import dataclasses
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orca_jax.observer import Observer
from orca_jax.request import USUAL, Constraint, RequestUpdate, SamplingParams, Urgency
from orca_jax.sched.plan import make_plan
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.scheduler import Scheduler
from orca_jax.step import Executor, ExecutorStats, Handle, StepPlan

HOST_PARTS = ("schedule", "update", "pack", "dispatch", "wait")
"""Parts of an iteration on the host; `totals` has the time of each under this name and `_seconds`."""
_STATE = frozenset({"waiting", "running", "in_flight", "num_pages", "free_pages", "reserved_slots"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot: totals since start, then the state of this moment."""

    iterations: int  # collected
    scheduled_requests: int  # sum of batch sizes over all plans
    scheduled_tokens: int  # sum of tokens over all plans
    schedule_seconds: float  # host time to select and plan, and to find out what constrained requests may draw
    update_seconds: float  # host time to record results and hand them out
    waiting: int  # requests without a row
    running: int  # requests with a row
    in_flight: int  # iterations
    preemptions: int
    cache_queries: int  # prompt tokens of all requests that began to run
    cache_hits: int  # of these, tokens whose pages were there
    num_pages: int
    free_pages: int
    reserved_slots: int  # the paper's n_rsrv

    @property
    def mean_batch_size(self) -> float:
        """Requests per iteration."""
        planned = self.iterations + self.in_flight
        return self.scheduled_requests / planned if planned else 0.0


def totals(engine: EngineStats, executor: ExecutorStats) -> dict[str, float]:
    """The totals since start of both, by field name, without the engine's state of the moment.

    `iterations` are those that the engine has collected.
    """
    both = dataclasses.asdict(executor) | dataclasses.asdict(engine)
    return {name: value for name, value in both.items() if name not in _STATE}


class Engine:
    """Runs requests on an executor, an iteration at a time. Not thread-safe: one thread owns an engine.

    Args:
        executor: runs plans; the caller closes it.
        scheduler: decides who runs next.
        pool: the requests, and through `pool.kv` the memory; nobody else may change it.
        seed: of the seeds that are drawn for requests without one.
        clock: seconds, monotonic; the unit of all times in updates.
        observer: is told of every turn.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        pool: RequestPool,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.pool = pool
        self.observer = observer or Observer()
        self._clock = clock
        self._seeds = random.Random(seed)
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()
        self._awaiting: tuple[StepPlan, Handle] | None = None  # the newest of them, before it was constrained
        self._iterations = 0
        self._scheduled_requests = 0
        self._scheduled_tokens = 0
        self._schedule_seconds = 0.0
        self._update_seconds = 0.0

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
        urgency: Urgency = USUAL,
    ) -> None:
        """Queue a request. `constraint` is what `params.structured` was compiled to, and serves this request alone.

        `urgency` says how soon, to the scheduler's ordering.

        Raises:
            RequestError: it could never run; `param` names the field and the message says how to mend it.
        """
        seed = self._seeds.getrandbits(63)
        now = self._clock()
        request = self.pool.add(
            request_id, prompt_ids, params, seed=seed, arrival=now, constraint=constraint, urgency=urgency
        )
        self.observer.arrived(request)

    def abort(self, request_id: str) -> bool:
        """End a request; a coming step hands out its last update. False if it is not live (any more)."""
        return self.pool.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.pool.has_work

    def step(self) -> list[RequestUpdate]:
        """One turn of Algorithm 1 (section 4.2): fill the pipeline, wait for its oldest iteration, hand out tokens.

        Returns at most one update for each request. What the executor raises passes through, and ends the engine.
        """
        while len(self._in_flight) < self.scheduler.n_workers:
            plan = self._plan()  # 4, 6, 7
            if plan is None:
                break
            self._in_flight.append((plan, self.executor.submit(plan)))  # 5, 8
            self.observer.submitted(plan, self.pool, self.executor.stats)
            if plan.is_constrained:
                self._awaiting = self._in_flight[-1]
                if not any([member.is_constrained and member.last_on_device for member in plan.members]):
                    self._constrain()  # while the layers run
        if not self._in_flight:
            return self._deliver()  # aborted while they waited
        plan, handle = self._in_flight.popleft()  # 15
        result = self.executor.collect(handle)  # 9, 10
        self.observer.collected(plan, result)
        start = time.perf_counter()
        self.pool.record(plan, result)  # 11-13
        self._constrain()  # the next iteration, where that has waited for these tokens
        updates = self._deliver()  # 13, 14
        self._iterations += 1
        self._update_seconds += time.perf_counter() - start
        return updates

    @property
    def num_running(self) -> int:
        """Number of requests with a row."""
        return self.pool.kv.num_held_rows

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row."""
        return len(self.pool) - self.pool.kv.num_held_rows

    @property
    def stats(self) -> EngineStats:
        """Where the engine stands."""
        kv = self.pool.kv
        return EngineStats(
            iterations=self._iterations,
            scheduled_requests=self._scheduled_requests,
            scheduled_tokens=self._scheduled_tokens,
            schedule_seconds=self._schedule_seconds,
            update_seconds=self._update_seconds,
            waiting=self.num_waiting,
            running=self.num_running,
            in_flight=len(self._in_flight),
            preemptions=self.pool.num_preemptions,
            cache_queries=self.pool.num_cache_queries,
            cache_hits=self.pool.num_cache_hits,
            num_pages=kv.num_pages,
            free_pages=kv.num_free_pages,
            reserved_slots=kv.reserved_slots,
        )

    def _plan(self) -> StepPlan | None:
        """The next iteration, or None when nobody can run."""
        start = time.perf_counter()
        self.observer.selecting()
        selection = self.scheduler.select(self.pool, self.pool.kv)
        for request in selection.preempted:
            self.pool.preempt(request)
            self.observer.preempted(request)
        if not selection.choices:
            return None
        number = self._iterations + len(self._in_flight)
        plan = make_plan(number, selection, self.pool, self._clock())
        self._scheduled_requests += len(plan.members)
        self._scheduled_tokens += sum([choice.num_tokens for choice in selection.choices])
        self._schedule_seconds += time.perf_counter() - start
        logger.debug("iteration %d: %d requests", number, len(plan.members))
        self.observer.planned()
        return plan

    def _deliver(self) -> list[RequestUpdate]:
        updates = self.pool.deliver(self.scheduler.may_return, self._clock())
        self.observer.delivered(updates)
        if not self.pool.has_work:
            self.executor.rest()
        return updates

    def _constrain(self) -> None:
        """Tell the executor what the newest iteration may draw, if it is still waiting for that."""
        if self._awaiting is None:
            return
        plan, handle = self._awaiting
        self._awaiting = None
        start = time.perf_counter()
        allowed = self.pool.allowed(plan)
        self._schedule_seconds += time.perf_counter() - start
        self.executor.constrain(handle, allowed)
