"""A pipeline in virtual time: stages, arrivals between the ends of iterations, and throughput."""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from orca_jax.engine import Engine
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import Scheduler
from orca_jax.sim.cost import LinearCost
from orca_jax.sim.executor import SimExecutor, VirtualClock
from orca_jax.values.request import RequestUpdate, SamplingParams

PAGES, PAGE_SIZE = 1000, 16
SECOND = LinearCost(per_iteration=1.0, per_token=0.0, per_pair=0.0)


class Arrival(NamedTuple):
    """A request: the time of its arrival, and its numbers of tokens."""

    at: float
    num_prompt: int
    num_generated: int


def play(
    scheduler: Scheduler,
    cost: LinearCost,
    num_stages: int,
    arrivals: Sequence[Arrival],
    *,
    blocks: bool = False,
) -> dict[int, RequestUpdate]:
    """The last update of each request; with `blocks` the engine waits for results alone."""
    clock = VirtualClock()
    lengths = {str(number): arrival.num_generated for number, arrival in enumerate(arrivals)}
    executor = SimExecutor(cost, clock, lengths, num_stages=num_stages)
    has_slots = scheduler.traits.has_reservations
    kv = KVManager((PAGES,), PAGE_SIZE, 64, PAGES * PAGE_SIZE // 2 if has_slots else None)
    engine = Engine(
        executor, scheduler, RequestPool(kv, vocab_size=2, max_model_len=1024), clock=clock
    )
    coming, ends = list(enumerate(arrivals)), {}

    def wait(handle: object) -> bool:
        return executor.wait_until(handle, coming[0][1].at if coming else math.inf)

    while coming or engine.has_work:
        if not engine.has_work:
            clock.now = max(clock.now, coming[0][1].at)
        while coming and coming[0][1].at <= clock.now:
            number, arrival = coming.pop(0)
            engine.add_request(
                str(number),
                [1] * arrival.num_prompt,
                SamplingParams(arrival.num_generated, ignore_eos=True),
            )
        for update in engine.step(None if blocks else wait):
            if update.finish_reason is not None:
                ends[int(update.request_id)] = update
    engine.pool.check_integrity()
    return ends


def chunked(max_bs: int, num_stages: int, depth: int | None = None) -> ChunkedScheduler:
    return ChunkedScheduler(
        max_bs, 64, FirstComeFirstServed(), n_workers=depth or num_stages, num_stages=num_stages
    )


Make = Callable[[int, int], Scheduler]
MAKERS: dict[str, Make] = {
    "orca": OrcaScheduler,
    "chunked": chunked,
    "request_level": RequestLevelScheduler,
}


def first_tokens(ends: dict[int, RequestUpdate]) -> list[float]:
    return [
        update.metrics.first_token
        for _, update in sorted(ends.items())
        if update.metrics is not None
    ]


@pytest.mark.parametrize("name", ["orca", "chunked"])
def test_an_arrival_enters_a_pipeline_with_room_at_once(name: str) -> None:
    """Two stages of half a second. B comes while A is on the first one, and enters it when A leaves it."""
    arrivals = [Arrival(0.0, 2, 3), Arrival(0.2, 2, 3)]
    ends = play(MAKERS[name](4, 2), SECOND, 2, arrivals)
    assert first_tokens(ends) == [1.0, 1.5]
    assert first_tokens(play(MAKERS[name](4, 2), SECOND, 2, arrivals, blocks=True))[1] >= 2.0, (
        "B waits for A"
    )


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    """Four chunks on four stages of a quarter of a second: the last one leaves after 7 of these, not after 16."""
    assert first_tokens(play(chunked(4, 4), SECOND, 4, [Arrival(0.0, 4 * 64, 1)])) == [7 / 4]


@pytest.mark.parametrize(("depth", "expected"), [(4, 4 / 4), (5, 4 / 4)])
def test_a_drawn_token_goes_through_all_stages(depth: int, expected: float) -> None:
    """The second token needs the first one, however many iterations may be in flight."""
    end = play(chunked(4, 4, depth), SECOND, 4, [Arrival(0.0, 2, 3)])[0]
    assert end.metrics is not None
    assert end.metrics.finished - end.metrics.first_token == 2 * expected


def test_requests_are_spread_over_the_stages() -> None:
    """Eight requests at once: two in each of four iterations, a quarter of a second apart."""
    ends = play(chunked(8, 4), SECOND, 4, [Arrival(0.0, 2, 1)] * 8)
    assert first_tokens(ends) == [1.0, 1.0, 1.25, 1.25, 1.5, 1.5, 1.75, 1.75]


GPT3 = LinearCost(per_iteration=0.108, per_token=0.0006, per_pair=1.4e-6)
"""A model of 175B parameters on one pipeline of A100s, all stages together: weights, tokens, keys and values."""


def throughput(name: str, num_stages: int, max_bs: int = 8) -> float:
    """Requests per second between the first and the last fourth of a saturated run."""
    dice = random.Random(0)
    arrivals = [Arrival(0.0, dice.randint(8, 64), dice.randint(1, 32)) for _ in range(400)]
    ends = play(MAKERS[name](max_bs, num_stages), GPT3, num_stages, arrivals)
    times = sorted(
        [update.metrics.finished for update in ends.values() if update.metrics is not None]
    )
    return 200 / (times[300] - times[100])


@pytest.mark.parametrize("name", ["orca", "chunked"])
def test_iteration_level_scheduling_fills_four_stages(name: str) -> None:
    """Figure 8a: a whole batch for each stage."""
    assert throughput(name, 4) >= 3.5 * throughput(name, 1)


def test_microbatches_do_not_fill_four_stages() -> None:
    """Figure 8b: one batch is cut, so each part of it reads all weights. Larger batches still end together."""
    assert throughput("request_level", 4) < 2 * throughput("request_level", 1)
    assert throughput("request_level", 4, max_bs=32) < throughput("orca", 1)
