"""Checks a policy on the toy model: small random cases, the smallest first, and one that looks for starvation."""

import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, product, takewhile
from types import FrameType
from typing import Any, NamedTuple

from orca_jax.assembly.scheduler import build_scheduling
from orca_jax.assembly.support import check_settings
from orca_jax.engine import Engine
from orca_jax.policy.errors import Interruption
from orca_jax.policy.kinds import PolicyKind
from orca_jax.policy.scheduler import PolicyScheduler
from orca_jax.sched.blocks import by_pool
from orca_jax.sim.executor import VirtualClock
from orca_jax.sim.toy import TOY_MODEL, ToyExecutor
from orca_jax.tools.simulate import NUM_CASES
from orca_jax.tools.simulate.guarded import WALL_SECONDS
from orca_jax.tools.simulate.run import config_with
from orca_jax.values.cache_hints import CacheHints, CacheWish
from orca_jax.values.cache_spec import ONE_GROUP, ceil_div
from orca_jax.values.config import LRU, CacheConfig, EngineConfig
from orca_jax.values.errors import OrcaError
from orca_jax.values.request import DEFAULT_URGENCY, SamplingParams, Urgency

LONGEST_WAIT = 256
"""Iterations after which a job that could run has waited too long, if the class has no `longest_wait`."""
LOOP_SECONDS = 5.0
"""Seconds of the processor for all decisions of a case, before the policy counts as looping."""
_IDLE_STEPS = 1000  # turns without a token, before a policy counts as idle for ever
_OLD = 4  # requests that must not starve
_MOST_LIVE = 32  # requests while one may starve
_SHOWN = 8  # requests in a message


class CaseRequest(NamedTuple):
    """A request of a case: its arrival in turns of the engine, its lengths, and the values for policies."""

    at: int
    prompt: int
    max_tokens: int
    urgency: Urgency = DEFAULT_URGENCY
    talk: int = (
        0  # of one talk a prompt begins with the shorter ones; 0: it begins like no other length
    )
    hints: CacheHints | None = None

    def __str__(self) -> str:
        words = f"{self.prompt}+{self.max_tokens} tokens at {self.at}"
        return f"{words} of talk {self.talk}" if self.talk else words


@dataclass(frozen=True)
class PolicyCase:
    """Requests, and the settings of an engine."""

    requests: tuple[CaseRequest, ...]
    settings: Mapping[str, Any]
    longest_wait: int = 0  # of the first requests, in turns; 0: all requests run to their ends

    def __str__(self) -> str:
        settings = ", ".join([f"{name} {value}" for name, value in self.settings.items()])
        many = "; ..." if len(self.requests) > _SHOWN else ""
        return f"{'; '.join(map(str, self.requests[:_SHOWN]))}{many} ({settings})"


class _Loops(Interruption):
    """A policy took too long; no `except Exception` of it stops this."""


def find_fault(
    policy: str | type[Any],
    options: str | None = None,
    seed: int = 0,
    num_cases: int = NUM_CASES,
    begin: Callable[[str, float], None] = lambda name, seconds: None,
) -> str:
    """Return one line with the first fault of a policy and its smallest case; "" if there is none.

    Args:
        policy: FILE.py:CLASS, or a class at the top of its module.
        options: `scheduler_options`, as JSON.
        seed: seed of the random cases.
        num_cases: number of random cases.
        begin: called before each case, with its words and the seconds that it may take.

    Raises:
        ConfigError: there is no such class, or it does not fit the protocol.
    """
    choices = check_settings(checked_config(policy, options, {}))
    kind = choices.batches.kind
    tried = cases(seed, num_cases)
    if isinstance(kind, PolicyKind):
        wait = 0
        if not getattr(kind.kind, "may_starve", True):
            wait = getattr(kind.kind, "longest_wait", LONGEST_WAIT)
        tried = chain(tried, starving_cases(wait) if wait else ())
    else:
        assert choices.requests.retention != LRU, "an outside class"
        tried = map(with_talks, tried)
    for case in tried:
        begin(f"the case {case}", WALL_SECONDS)
        fault = fault_of(policy, options, case)
        if fault:
            begin(f"a part of the case {case}", WALL_SECONDS * len(case.requests))
            if not case.longest_wait:
                case, fault = _smallest(policy, options, case, fault)
            return f"{fault}; smallest case: {case}"
    return ""


def cases(seed: int, number: int) -> Iterator[PolicyCase]:
    """Yield random cases; later ones have more requests."""
    for index in range(number):
        rng = random.Random(f"case-{seed}-{index}")
        most = 2 + index // 12
        requests = [
            CaseRequest(
                rng.randrange(2 * most),
                rng.randint(1, 3 + most),
                rng.randint(1, 2 + most),
                Urgency(
                    rng.randint(-2, 2),
                    rng.choice("ab"),
                    rng.choice([None, 5.0, 50.0]),
                    rng.choice(["", "x", "y"]),
                ),
            )
            for _ in range(rng.randint(1, most))
        ]
        max_batch = rng.randint(1, 4)
        page_size = rng.choice([2, 4])
        longest = max([request.prompt + request.max_tokens for request in requests])
        least = ceil_div(longest, page_size)
        settings = {
            "max_num_seqs": max_batch,
            "max_num_batched_tokens": max(max_batch, rng.choice([4, 8, 16])),
            "max_num_rows": max_batch + rng.randrange(3),
            "num_pages": least + rng.randrange(1 + least),
            "page_size": page_size,
            "overlap": rng.random() < 0.5,
        }
        yield PolicyCase(tuple(sorted(requests, key=lambda request: request.at)), settings)


def with_talks(case: PolicyCase) -> PolicyCase:
    """Return a case for retentions: its requests come three times as turns of a few talks, and some have wishes."""
    wishes = (
        None,
        CacheHints("a", wishes=(CacheWish(ttl=8.0),)),
        CacheHints("a", wishes=(CacheWish(0, 2, priority=100), CacheWish(2, priority=0))),
        CacheHints("b", ends=True),
    )
    requests = [
        each._replace(
            at=each.at + 8 * again, talk=1 + index % 2, hints=wishes[(again + index) % len(wishes)]
        )
        for again, (index, each) in product(range(3), enumerate(case.requests))
    ]
    return replace(case, requests=tuple(sorted(requests, key=lambda request: request.at)))


def starving_cases(longest_wait: int) -> Iterator[PolicyCase]:
    """Yield cases in which newer requests keep coming, shorter or more urgent ones."""
    sizes = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "max_num_rows": 3,
        "num_pages": 64,
        "page_size": 4,
    }
    for old, new in (
        (CaseRequest(0, 12, 12), CaseRequest(0, 1, 2)),
        (CaseRequest(0, 2, 4, Urgency(2)), CaseRequest(0, 2, 4, Urgency(-2))),
        (
            CaseRequest(0, 2, 4, Urgency(tenant="a", program="a")),
            CaseRequest(0, 3, 2, Urgency(deadline=1.0)),
        ),
        (CaseRequest(1, 1, 2), CaseRequest(0, 8, 12)),
    ):
        news = [new._replace(at=at) for at in range(2 * longest_wait)]
        yield PolicyCase(
            tuple(sorted([old, *news], key=lambda each: (each.at, each != old))),
            sizes,
            longest_wait,
        )


def fault_of(policy: str | type[Any], options: str | None, case: PolicyCase) -> str:
    """Return the fault of a policy in a case; "" if there is none."""
    run = _CaseRun(checked_config(policy, options, case.settings), case)
    try:
        with _limited(LOOP_SECONDS):
            return run.fault()
    except _Loops:
        method = "decide" if isinstance(run.scheduler, PolicyScheduler) else "a method"
        return f"{method} runs for more than {LOOP_SECONDS:g} s"
    except (OrcaError, AssertionError) as error:
        return run.unnamed(str(error))


def checked_config(
    policy: str | type[Any], options: str | None, settings: Mapping[str, Any]
) -> EngineConfig:
    """Return settings with a policy, an order or a retention."""
    config = config_with(policy, **settings)
    if config.scheduler == "chunked":  # neither an order nor a retention pauses anything
        return replace(config, max_num_rows=None)
    return replace(config, scheduler_options=options)


def _smallest(
    policy: str | type[Any], options: str | None, case: PolicyCase, fault: str
) -> tuple[PolicyCase, str]:
    """Leave out requests as long as there is a fault."""
    for request in case.requests[::-1]:
        rest = tuple(other for other in case.requests if other is not request)
        if rest and (found := fault_of(policy, options, replace(case, requests=rest))):
            case = replace(case, requests=rest)
            fault = found
    return case, fault


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer"):  # a browser, whose page has a limit of its own
        yield
        return

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise _Loops

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


class _CaseRun:
    """One run of a case; its clock counts turns."""

    def __init__(self, config: EngineConfig, case: PolicyCase) -> None:
        choices = check_settings(config)
        longest = max([request.prompt + request.max_tokens for request in case.requests])
        num_pages = config.num_pages or 1
        size = config.page_size or 1
        budget = config.max_num_batched_tokens or 1
        cache = CacheConfig(ONE_GROUP, (num_pages,), size, "float32")
        self.clock = VirtualClock()
        scheduler, self.pool = build_scheduling(
            choices, TOY_MODEL, longest, cache, budget, clock=self.clock
        )
        self.scheduler = scheduler
        executor = ToyExecutor(TOY_MODEL.vocab_size, (num_pages,), size, choices.requests.num_rows)
        sleep = self.clock.sleep
        self.engine = Engine(executor, scheduler, self.pool, clock=self.clock, sleep=sleep)
        self.case = case
        self.tokens: list[list[int]] = []
        self.seen: dict[int, tuple[int, int]] = {}  # progress of the first requests, and its turn

    def fault(self) -> str:
        """Run all requests to their ends, and return the first fault."""
        coming = list(self.case.requests)
        turn = 0
        last = 0
        while coming or self.engine.has_work:
            while coming and coming[0].at <= turn:
                request = coming.pop(0)
                if not self.case.longest_wait or len(self.pool) < _MOST_LIVE:
                    self._add(request)
            updates = self.engine.step()
            turn += 1
            self.clock.now = self.clock.now + 1.0
            for update in updates:
                self.tokens[int(update.request_id)].extend(update.new_ids)
            if fault := self._mended():
                return fault
            if self.case.longest_wait:
                if (fault := self._starving(turn)) or not coming:
                    return fault
                continue
            self.pool.check_integrity()
            last = turn if updates or not self.engine.has_work else last
            if turn - last > _IDLE_STEPS:
                return f"no token in {_IDLE_STEPS} turns, and not all requests have ended"
        return self._fault_at_the_end()

    def unnamed(self, text: str) -> str:
        """Return an error without the name of the class."""
        if isinstance(self.scheduler, PolicyScheduler):
            return text.removeprefix(f"{self.scheduler.name}: ")
        return text.partition(": ")[2] or text

    def _mended(self) -> str:
        """Return the fault that the engine has mended; "" if there is none."""
        if self.pool.kv.retainer is not None:
            return self.unnamed(self.pool.kv.retainer.fault)
        assert isinstance(self.scheduler, PolicyScheduler), "an outside class"
        if not self.scheduler.guard.num_overrules:
            return ""
        return f"the engine had to overrule it: {self.scheduler.guard.last_reason}"

    def _add(self, request: CaseRequest) -> None:
        params = SamplingParams(
            request.max_tokens, temperature=0.0, ignore_eos=True, cache_hints=request.hints
        )
        name = str(len(self.tokens))
        self.engine.add_request(name, _prompt(request), params, urgency=request.urgency)
        self.tokens.append([])

    def _starving(self, turn: int) -> str:
        for request in takewhile(lambda request: request.arrival_index < _OLD, self.pool):
            n = request.arrival_index
            progress = request.num_computed + len(request.generated_ids)
            before, since = self.seen.get(n, (-1, turn))
            if progress != before:
                self.seen[n] = progress, turn
            elif turn - since > self.case.longest_wait:
                return f"job {n} did not run in {turn - since} iterations, and may_starve is False"
        return ""

    def _fault_at_the_end(self) -> str:
        kv = self.pool.kv
        if by_pool(kv.num_free_blocks) != kv.num_blocks or kv.num_held_rows:
            return f"{sum(kv.num_blocks) - sum(by_pool(kv.num_free_blocks))} pages are lost"
        for n, (request, tokens) in enumerate(zip(self.case.requests, self.tokens, strict=True)):
            if tokens != toy_answer(_prompt(request), request.max_tokens):
                return f"job {n} has other tokens than alone"
        return ""


def _prompt(request: CaseRequest) -> list[int]:
    size = TOY_MODEL.vocab_size
    step = 7 * (request.talk or request.prompt)
    return [(step * number) % size for number in range(request.prompt)]


def toy_answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy tokens of the toy model after a prompt (`sim/toy.py`)."""
    ids = list(prompt)
    total = sum([place * (token + 1) for place, token in enumerate(ids, 1)])
    for _ in range(num_tokens):
        ids.append(total % TOY_MODEL.vocab_size)
        total += len(ids) * (ids[-1] + 1)
    return ids[len(prompt) :]
