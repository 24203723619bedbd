"""The engine: Algorithm 1 of the paper around a scheduler and an executor."""

import dataclasses
import logging
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orca_jax.sched.blocks import by_pool
from orca_jax.sched.observer import Observer, Observers
from orca_jax.sched.plan import make_plan
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefixes.outer import OuterPages
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Scheduler
from orca_jax.values.lora_request import Adapter
from orca_jax.values.request import (
    DEFAULT_URGENCY,
    Constraint,
    RequestUpdate,
    SamplingParams,
    Urgency,
)
from orca_jax.values.resumed import Resumed
from orca_jax.values.step import Executor, ExecutorStats, Handle, StepPlan

HOST_PARTS = ("schedule", "update", "pack", "dispatch", "wait")
"""Parts of an iteration on the host; `totals` has the time of each under this name and `_seconds`."""
ACCEPTED_PER_POS = "spec_decode_accepted_per_pos"
"""`totals` has the number of accepted tokens at each place of the proposals under this name, `_` and the place."""
PLANS_BY_TOKENS = "plans_by_tokens"
"""`totals` has the number of plans between two of `PLAN_TOKENS` under this name, `_` and the place of the upper one."""
PLAN_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the tokens of a plan, by which plans are counted."""
IDLE_SECONDS = 0.01
"""The longest sleep between two selections; an arrival waits for its end."""
_STATE = frozenset(
    {
        "waiting",
        "running",
        "in_flight",
        "num_pages",
        "free_pages",
        "reserved_slots",
        "group_blocks",
        "state_blocks",
        "running_loras",
        "waiting_loras",
    }
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot: totals since start, then the state of this moment."""

    iterations: int = 0  # collected
    scheduled_requests: int = 0  # sum of batch sizes over all plans
    scheduled_tokens: int = 0  # sum of tokens over all plans
    # host time to select and plan, and to compute the allowed ids of constrained requests
    schedule_seconds: float = 0.0
    update_seconds: float = 0.0  # host time to record results and deliver updates
    wait_seconds: float = 0.0  # for a result or an arrival, with room for another iteration
    waiting: int = 0  # requests without a row
    running: int = 0  # requests with a row
    in_flight: int = 0  # iterations
    preemptions: int = 0
    cache_queries: int = 0  # prompt tokens of all requests that began to run
    cache_hits: int = 0  # of these, tokens found in the prefix cache
    num_pages: int = 0
    free_pages: int = 0
    reserved_slots: int = 0  # the paper's n_rsrv
    running_loras: tuple[str, ...] = ()  # names of the adapters of requests with a row
    waiting_loras: tuple[str, ...] = ()  # and of those without
    spec_decode_drafts: int = 0  # proposals of speculation, each of one or several tokens
    spec_decode_draft_tokens: int = 0
    spec_decode_accepted_tokens: int = 0
    # the accepted ones by their place in the proposal
    spec_decode_accepted_per_pos: tuple[int, ...] = ()
    overruled_decisions: int = 0  # of a policy from outside, for the sake of progress
    slow_decisions: int = 0  # of a policy from outside
    # plans of at most PLAN_TOKENS[i] tokens, and beyond; each counts once
    plans_by_tokens: tuple[int, ...] = ()
    # pages outside of the devices: saved there, back in the prefix cache, and neither since a tier failed
    saved_pages: int = 0
    restored_pages: int = 0
    failed_pages: int = 0
    late_grammars: int = 0  # given up, since compiling took too long
    late_adapters: int = 0  # given up, since reading took too long
    # of rows in each group of layers; a shared block counts for each row
    group_blocks: tuple[int, ...] = ()
    # of recurrent states: of rows, snapshots, and the others; () without states
    state_blocks: tuple[int, ...] = ()

    @property
    def mean_batch_size(self) -> float:
        """Requests per iteration."""
        planned = self.iterations + self.in_flight
        if not planned:
            return 0.0
        return self.scheduled_requests / planned


@dataclass(slots=True)
class InFlight:
    """A submitted iteration."""

    plan: StepPlan
    handle: Handle
    needs_mask: bool  # `Executor.constrain` was not called for it yet


def totals(engine: EngineStats, executor: ExecutorStats) -> dict[str, float]:
    """The totals since start of both, by field name, without the engine's state of the moment.

    `iterations` are those that the engine has collected, and `wait_seconds` is the sum of both.
    """
    both = dataclasses.asdict(executor) | dataclasses.asdict(engine)
    both["wait_seconds"] += executor.wait_seconds
    for place, count in enumerate(both.pop(ACCEPTED_PER_POS)):
        both[f"{ACCEPTED_PER_POS}_{place}"] = count
    for place, count in enumerate(both.pop(PLANS_BY_TOKENS)):
        both[f"{PLANS_BY_TOKENS}_{place}"] = count
    return {name: value for name, value in both.items() if name not in _STATE}


Wait = Callable[[Handle], bool]
"""Waits for the result of an iteration, and returns True; or returns False earlier, since requests were added."""


class Engine:
    """Runs requests on an executor, one iteration at a time. Not thread-safe: one thread owns an engine.

    Args:
        executor: runs plans; the caller closes it.
        scheduler: decides which requests run next.
        pool: the requests and, as `pool.kv`, the memory; only the engine changes it.
        seed: seeds the random seeds of requests without one.
        clock: seconds, monotonic; the unit of all times in updates.
        sleep: waits for seconds of the clock, when a scheduler lets all requests wait.
        observer: receives every event.
        weights: the weights of adapters by key, as the executor reads them; None for no adapters.
        check_in_interval: results to read together when no further iteration may be in flight, below `n_workers` of
            the scheduler unless 1.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        pool: RequestPool,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        observer: Observer | None = None,
        weights: MutableMapping[str, Any] | None = None,
        check_in_interval: int = 1,
    ) -> None:
        self.executor = executor
        self.scheduler = scheduler
        self.pool = pool
        self.observer = observer or Observer()
        self.check_in_interval = check_in_interval
        self._clock = clock
        self._sleep = sleep
        self._weights = {} if weights is None else weights
        self._seeds = random.Random(seed)
        self.weight_version = 0  # that of the weights at the start
        self._in_flight: deque[InFlight] = deque()
        self._iterations = self._scheduled_requests = self._scheduled_tokens = 0
        self._plans_by_tokens = [0] * (len(PLAN_TOKENS) + 1)
        self._overruled_decisions = self._slow_decisions = 0
        self._schedule_seconds = self._update_seconds = self._wait_seconds = 0.0

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
        urgency: Urgency = DEFAULT_URGENCY,
        adapter: str | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        """Enqueue a request.

        `constraint` is `params.structured` in compiled form; it belongs to this request alone. The scheduler's
        ordering reads `urgency`. `adapter` is the name of an adapter; None for the model itself. A request that an
        earlier engine began goes on after the ids of `resumed`.

        Raises:
            RequestError: the request could never run; `param` names the field and the message says how to change it.
        """
        seed = self._seeds.getrandbits(63)
        now = self._clock()
        request = self.pool.add_request(
            request_id,
            prompt_ids,
            params,
            seed=seed,
            arrival=now,
            constraint=constraint,
            urgency=urgency,
            adapter=adapter,
            resumed=resumed,
        )
        self.observer.arrived(request)

    def abort(self, request_id: str) -> bool:
        """End a request; a later step returns its last update. False if it is not live (any more)."""
        return self.pool.abort(request_id)

    def add_adapter(self, adapter: Adapter, weights: Any) -> None:
        """Make an adapter available to new requests by its name. Raises the errors of `AdapterSlots.add_adapter`."""
        self.pool.adapters.add_adapter(adapter)
        self._weights[adapter.key] = weights

    def remove_adapter(self, name: str) -> None:
        """Refuse an adapter to new requests. Its weights are freed when the last of its requests has ended.

        Raises:
            RequestError: no adapter has this name.
        """
        self.pool.adapters.remove(name)
        self._free_weights()

    def replace_adapter(self, adapter: Adapter, weights: Any) -> int:
        """Let a name stand for another adapter from now on, also if it is new. Live requests keep theirs.

        Returns:
            The version of the weights, the next one.

        Raises:
            RequestError: as of `add_adapter`.
        """
        if adapter.name in self.pool.adapters.named:
            self.remove_adapter(adapter.name)
        self.add_adapter(adapter, weights)
        self.weight_version += 1
        return self.weight_version

    def _free_weights(self) -> None:
        for key in self.pool.adapters.take_unused():
            self._weights.pop(key, None)

    def update_weights(self, put: Callable[[], None], version: int | None = None) -> int:
        """Replace the weights between two iterations, and empty the prefix cache, which is of the old ones.

        No request may be live, or they have stopped by `vacate`: else an answer has tokens of one version. If `put`
        fails, the engine cannot be used.

        Args:
            put: replaces the weights of the executor.
            version: number of the new weights; None: the next one.

        Returns:
            The version, also in `weight_version`.
        """
        assert not self.pool.running and not self._in_flight, (
            "weights are replaced when no request has a row"
        )
        put()
        self.forget_prefixes()
        if self.outer is not None:
            self.outer.turn_off()  # its pages are of the old weights, also after a later start
        if version is None:
            version = self.weight_version + 1
        self.weight_version = version
        logger.info("the weights have version %d", self.weight_version)
        return self.weight_version

    def vacate(self) -> list[RequestUpdate]:
        """Record the iterations in flight, and preempt all requests: they compute their tokens again later.

        Returns:
            The updates of these iterations.
        """
        while self._in_flight:
            if self._in_flight[0].needs_mask:
                self._mask(self._in_flight[0])
            self._record(self._in_flight.popleft())
        updates = self._deliver(lambda _: True)  # also those that a scheduler would hold
        for request in tuple(self.pool.running.values()):
            self.pool.preempt(request)
            self.observer.preempted(request)
        return updates

    def forget_prefixes(self) -> None:
        """Empty the prefix cache of the devices. Running requests keep their pages, which no other request finds."""
        self.pool.kv.prefixes.forget_all()

    def reschedule(
        self, scheduler: Scheduler, pool: RequestPool, check_in_interval: int = 1
    ) -> None:
        """Use another scheduler and another pool. No request may be live."""
        assert not self.has_work and not self._in_flight, "requests are open"
        self.scheduler = scheduler
        self.pool = pool
        self.check_in_interval = check_in_interval

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Pass the events of a block to another observer too. Blocks end in the opposite order of their begins."""
        before = self.observer
        self.observer = observer
        if type(before) is not Observer:  # the base class has no events to pass on
            self.observer = Observers(before, observer)
        try:
            yield
        finally:
            self.observer = before

    @property
    def has_work(self) -> bool:
        """True if `step` has anything to do."""
        return self.pool.has_work

    @property
    def progress(self) -> int:
        """A count of launches, sets of allowed ids and collected iterations, also for other threads.

        Arrivals do not count: they may continue while the device hangs.
        """
        return self.executor.stats.launches + self._iterations + self.pool.num_sets

    def step(self, wait: Wait | None = None) -> list[RequestUpdate]:
        """One turn of Algorithm 1 (section 4.2); the numbers are its lines.

        With room for another iteration and no request to run in it, `wait` may end the turn without a result. Returns
        at most one update for each request. An exception of the executor passes through and ends the engine.
        """
        if self.outer is not None:
            self.outer.restore()
        while (has_room := self._has_room()) and (plan := self._select()):  # 4, 6, 7
            self._submit(plan)  # 5, 8
        if self._in_flight and (not has_room or wait is None or self._await(wait)):  # 9
            most_left = self.scheduler.n_workers - self.check_in_interval
            for _ in range(max(1, len(self._in_flight) - most_left)):
                self._record(self._in_flight.popleft())  # 15, 10-13
            if self._in_flight and self._in_flight[-1].needs_mask:  # it has waited for these tokens
                self._mask(self._in_flight[-1])
        return self._deliver(self.scheduler.may_return)  # 13, 14

    def _has_room(self) -> bool:
        """True if another iteration may be submitted: a worker is free, and no sampler waits for allowed ids."""
        in_flight = self._in_flight
        return len(in_flight) < self.scheduler.n_workers and not (
            in_flight and in_flight[-1].needs_mask
        )

    def _await(self, wait: Wait) -> bool:
        start = time.perf_counter()
        is_ready = wait(self._in_flight[0].handle)
        self._wait_seconds += time.perf_counter() - start
        return is_ready

    def _select(self) -> StepPlan | None:
        """The next iteration, or None if no request can run."""
        start = time.perf_counter()
        self.observer.selecting()
        self.pool.now = self._clock()
        selection = self.scheduler.select(self.pool, self.pool.kv)
        if selection.is_overruled:
            self._overruled_decisions += 1
            self.observer.overruled()
        self._slow_decisions += selection.is_slow
        for request in selection.preempted:
            self.pool.preempt(request)
            self.observer.preempted(request)
        if not selection.choices:
            if not self._in_flight:
                self._rest(selection.wake_after)
            return None
        number = self._iterations + len(self._in_flight)
        plan = make_plan(number, selection, self.pool, self.pool.now)
        self._scheduled_requests += len(plan.members)
        tokens = sum([choice.num_tokens for choice in selection.choices])
        self._scheduled_tokens += tokens
        self._plans_by_tokens[bisect_left(PLAN_TOKENS, tokens)] += 1
        self._schedule_seconds += time.perf_counter() - start
        logger.debug("iteration %d: %d requests", number, len(plan.members))
        self.observer.planned(selection.held)
        return plan

    def _rest(self, wake_after: float | None) -> None:
        """Wait as long as a scheduler wishes, or until pages of a request are read."""
        if wake_after is not None:
            self._sleep(min(wake_after, IDLE_SECONDS))
        elif self.outer is not None:
            self.outer.wait(IDLE_SECONDS)

    def _submit(self, plan: StepPlan) -> None:
        newest = InFlight(plan, self.executor.submit(plan), plan.is_constrained)
        self._in_flight.append(newest)
        self.observer.submitted(plan, self.pool, self.executor.stats)
        if newest.needs_mask and not plan.has_unknown_context:
            self._mask(newest)  # while the layers run

    def _record(self, oldest: InFlight) -> None:
        """Wait for an iteration, and record its results in the pool."""
        result = self.executor.collect(oldest.handle)
        self.observer.collected(oldest.plan, result)
        start = time.perf_counter()
        self.pool.record(oldest.plan, result)
        self.save_pages()
        self._iterations += 1
        self._update_seconds += time.perf_counter() - start

    def save_pages(self) -> None:
        """Begin to save new pages outside of the devices, as far as no prompt is computed and there is room."""
        if self.outer is not None:
            self.outer.save_between(self.pool.running.values())

    def _deliver(self, may_return: Callable[[Request], bool]) -> list[RequestUpdate]:
        start = time.perf_counter()
        updates = self.pool.deliver(may_return, self._clock())
        self.observer.delivered(updates)
        if self.pool.adapters.unused:
            self._free_weights()
        if not self.pool.has_work:
            self.executor.rest()
        self._update_seconds += time.perf_counter() - start
        return updates

    def _mask(self, newest: InFlight) -> None:
        """Send the allowed ids of the constrained members; the sampler of the iteration waits for them."""
        start = time.perf_counter()
        allowed = self.pool.allowed(newest.plan)
        self._schedule_seconds += time.perf_counter() - start
        self.executor.constrain(newest.handle, allowed)
        newest.needs_mask = False

    @property
    def outer(self) -> OuterPages | None:
        """The pages outside of the KV cache."""
        return None if self.pool.reuse is None else self.pool.reuse.outer

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
        """The totals and the state of this moment."""
        kv = self.pool.kv
        drafts = self.pool.drafts
        adapters = self.pool.adapters
        outer = self.outer
        return EngineStats(
            iterations=self._iterations,
            scheduled_requests=self._scheduled_requests,
            scheduled_tokens=self._scheduled_tokens,
            schedule_seconds=self._schedule_seconds,
            update_seconds=self._update_seconds,
            wait_seconds=self._wait_seconds,
            waiting=self.num_waiting,
            running=self.num_running,
            in_flight=len(self._in_flight),
            preemptions=self.pool.num_preemptions,
            cache_queries=self.pool.num_cache_queries,
            cache_hits=self.pool.num_cache_hits,
            num_pages=sum(kv.num_blocks),
            free_pages=sum(by_pool(kv.num_free_blocks)),
            reserved_slots=sum(by_pool(kv.reserved_slots)),
            group_blocks=kv.used_by_group(),
            state_blocks=() if kv.states is None else kv.states.by_use(),
            running_loras=tuple(adapters.running) if adapters.num_slots else (),
            waiting_loras=tuple(adapters.waiting) if adapters.num_slots else (),
            saved_pages=0 if outer is None else outer.num_saved,
            restored_pages=0 if outer is None else outer.num_restored,
            failed_pages=0 if outer is None else outer.num_failed,
            overruled_decisions=self._overruled_decisions,
            slow_decisions=self._slow_decisions,
            plans_by_tokens=tuple(self._plans_by_tokens),
            spec_decode_drafts=drafts.num_drafts,
            spec_decode_draft_tokens=drafts.num_draft_tokens,
            spec_decode_accepted_tokens=drafts.num_accepted_tokens,
            spec_decode_accepted_per_pos=tuple(drafts.accepted_per_pos),
        )
