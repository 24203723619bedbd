"""Runs of one engine in virtual time: requests with given lengths, some of which follow the end of others."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from orca_jax.engine import Engine
from orca_jax.policy import Policy
from orca_jax.policy.scheduler import PolicyScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.predict import EnginePredictor, Oracle
from orca_jax.sched.prefixes.spans import Retainer
from orca_jax.sched.scheduler import KnownScheduler
from orca_jax.sim.cost import IterationCost
from orca_jax.sim.executor import END_ID, OTHER_ID, SimExecutor, VirtualClock
from orca_jax.tools.bench.feed import Drive
from orca_jax.values.cache_hints import CacheHints
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import RequestUpdate, SamplingParams, Urgency

FIRST_ID = OTHER_ID + 1  # of the ids in prompts that share beginnings


class Call(NamedTuple):
    """A request of a load.

    Attributes:
        arrival: seconds; with `after` they are counted from the end of that request.
        num_prompt: tokens of the prompt.
        num_generated: tokens that it generates.
        max_tokens: its bound on them; 0: the number itself.
        tenant: client or program.
        after: index of the request that it follows.
        prompt: ids, if prompts share beginnings.
        program: agent or conversation.
        hints: wishes about its cache.
    """

    arrival: float
    num_prompt: int
    num_generated: int
    max_tokens: int = 0
    tenant: str = ""
    after: int | None = None
    prompt: Sequence[int] = ()
    program: str = ""
    hints: CacheHints | None = None


class Devices(NamedTuple):
    """Simulated devices, and the limits of an engine on them."""

    cost: IterationCost
    num_pages: int
    page_size: int = 16
    max_batch: int = 32
    token_budget: int = 512
    num_rows: int | None = None  # None: as many as `max_batch`
    longest: int = 2048  # tokens of a request
    reuses_prefixes: bool = False


class Service(NamedTuple):
    """The service of one request.

    Attributes:
        arrival: seconds.
        tokens: times of the delivery of its tokens.
    """

    arrival: float
    tokens: list[float]

    @property
    def end(self) -> float:
        """Time of the last token."""
        return self.tokens[-1]

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next."""
        return [later - earlier for earlier, later in pairwise(self.tokens)]

    @property
    def normalized(self) -> float:
        """Seconds from arrival to end, by the number of tokens."""
        return (self.end - self.arrival) / len(self.tokens)


class Outcome(NamedTuple):
    """A run.

    Attributes:
        services: by the index of the call.
        evictions: preemptions of all requests.
        tokens_again: tokens that were computed more than once, of prompts and outputs.
        overrules: decisions of the policy that the engine's guard changed.
        samples: begin, end, and requests in the engine, of each turn.
        cached: tokens of prompts that the prefix cache had.
        lost: full pages that it gave up.
    """

    services: Sequence[Service]
    evictions: int
    tokens_again: int
    overrules: int
    samples: Sequence[tuple[float, float, int]]
    cached: int = 0
    lost: int = 0


Maker = Callable[[Devices], KnownScheduler]
"""Makes a scheduler for the limits of an engine."""


def on_protocol(policy: Policy, devices: Devices) -> PolicyScheduler:
    """The scheduler of a policy."""
    return PolicyScheduler(
        policy,
        max_bs=devices.max_batch,
        token_budget=devices.token_budget,
        num_rows=devices.num_rows or devices.max_batch,
    )


def serve_calls(
    make: Maker,
    calls: Sequence[Call],
    devices: Devices,
    predictor: Callable[[], EnginePredictor] | None = None,
    retain: Callable[[RequestPool], Retainer] | None = None,
    begun: Callable[[int], None] = lambda index: None,
) -> Outcome:
    """Serve all calls.

    Args:
        make: makes the scheduler.
        calls: those without `after` in the order of arrival.
        devices: the limits.
        predictor: makes the predictor of lengths; None: it knows them.
        retain: makes the retention; None: the least recently used pages go first.
        begun: called with the index of each call that has drawn its first token.
    """
    clock = VirtualClock()
    scheduler = make(devices)
    lengths = {str(index): call.num_generated for index, call in enumerate(calls)}
    rows = devices.num_rows or devices.max_batch
    slots = devices.num_pages * devices.page_size
    reserved = slots - rows * (devices.page_size - 1) if scheduler.traits.has_reservations else None
    kv = KVManager((devices.num_pages,), devices.page_size, rows, reserved)
    pool = RequestPool(
        kv,
        vocab_size=1 + max([max(call.prompt, default=OTHER_ID) for call in calls]),
        max_model_len=devices.longest,
        eos_token_ids=(END_ID,),
        reuses_prefixes=devices.reuses_prefixes and scheduler.traits.shares_prefixes,
        predictor=Oracle(lengths) if predictor is None else predictor(),
    )
    if retain is not None:
        kv.retain(retain(pool))
    kv.prefixes.watcher = losses = _Losses()
    executor = SimExecutor(devices.cost, clock, lengths)
    engine = Engine(executor, scheduler, pool, clock=clock, sleep=clock.sleep)
    run = _Run(engine, clock, calls, begun)
    drive = Drive.in_virtual_time(engine, executor, clock)
    arrivals = [call.arrival for call in calls]
    for updates in drive.serve(arrivals, run.add, [call.after for call in calls]):
        run.take(updates, clock.now)
    wanted = sum([call.num_prompt + call.num_generated - 1 for call in calls]) - pool.num_cache_hits
    overrules = engine.stats.overruled_decisions
    if kv.retainer is not None and kv.retainer.fault:
        raise ConfigError(f"retention: {kv.retainer.fault}", param="retention")
    again = executor.stats.tokens - wanted
    return Outcome(
        run.services,
        pool.num_preemptions,
        again,
        overrules,
        run.samples,
        pool.num_cache_hits,
        losses.number,
    )


class _Losses:
    """Counts the full pages that the prefix cache gives up."""

    def __init__(self) -> None:
        self.number = 0

    def stored(self, *facts: Any) -> None:
        """Does nothing: a page that is stored may stay."""

    def removed(self, digest: bytes, group: int) -> None:
        """Count a page."""
        self.number += 1


class _Run:
    """The calls of a run, as they come to an engine, and their service so far."""

    def __init__(
        self,
        engine: Engine,
        clock: VirtualClock,
        calls: Sequence[Call],
        begun: Callable[[int], None],
    ) -> None:
        self.services = [Service(call.arrival, []) for call in calls]
        self.samples = list[tuple[float, float, int]]()
        self._engine = engine
        self._clock = clock
        self._calls = calls
        self._begun = begun
        self._prompt = [OTHER_ID] * max([call.num_prompt for call in calls])
        self._begin = 0.0  # of the next turn
        self._number = 0  # requests in the engine at its begin

    def add(self, index: int, due: float) -> None:
        """Add a call to the engine."""
        call = self._calls[index]
        self.services[index] = Service(due, [])
        params = SamplingParams(
            call.max_tokens or call.num_generated, temperature=0.0, cache_hints=call.hints
        )
        prompt = call.prompt or self._prompt[: call.num_prompt]
        urgency = Urgency(tenant=call.tenant, program=call.program)
        self._engine.add_request(str(index), prompt, params, urgency=urgency)
        self._begin = self._clock.now
        self._number += 1

    def take(self, updates: Sequence[RequestUpdate], now: float) -> None:
        """Count the tokens of a turn that ended at `now`."""
        for update in updates:
            assert update.error is None, update.error
            index = int(update.request_id)
            tokens = self.services[index].tokens
            if update.new_ids and not tokens:
                self._begun(index)
            tokens.extend([now] * len(update.new_ids))
        self.samples.append((self._begin, now, self._number))
        self._begin = now
        self._number = len(self._engine.pool)
