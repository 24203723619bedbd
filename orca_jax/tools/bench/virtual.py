"""An engine in virtual time: requests with given lengths arrive at given times, and its timeline is the result."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from orca_jax.assembly.choices import Choices
from orca_jax.assembly.scheduler import build_scheduling, speculating
from orca_jax.engine import Engine
from orca_jax.sched.drafts.proposer import Proposer
from orca_jax.sched.predict import EnginePredictor
from orca_jax.sched.scheduler import Scheduler
from orca_jax.sim.cost import IterationCost, WorkCounts, seconds_by
from orca_jax.sim.executor import END_ID, OTHER_ID, SimExecutor, VirtualClock
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.timeline.writer import TimelineHeader, TimelineLine, TimelineWriter
from orca_jax.tools.bench.feed import Drive
from orca_jax.values.request import DEFAULT_URGENCY, SamplingParams, Urgency

FIRST_ID = OTHER_ID + 1
"""The lowest id of prompts."""


class SimulatedRequest(NamedTuple):
    """A request of a simulation.

    Attributes:
        arrival: seconds since the start, or since the end of the request `after`.
        prompt: its ids; or their number, and then no two prompts begin alike.
        num_output: tokens that it generates.
        max_tokens: the most that it asks for; None: as many as it generates.
        urgency: what schedulers read.
        after: index of the request whose end it waits for; None: it waits for none.
    """

    arrival: float
    prompt: int | Sequence[int]
    num_output: int
    max_tokens: int | None = None
    urgency: Urgency = DEFAULT_URGENCY
    after: int | None = None


class VirtualDevice(NamedTuple):
    """What takes the place of model and devices.

    Attributes:
        cost: seconds of iterations.
        predictor: predictor of output lengths; None: the settings name it.
        proposer: proposer of speculation.
        acceptance: chance of a proposed token to be drawn, if all before it were.
        start: seconds on the clock before anything arrives.
        num_stages: devices of a pipeline.
        wrap: replaces the scheduler of the settings.
    """

    cost: IterationCost
    predictor: EnginePredictor | None = None
    proposer: Proposer | None = None
    acceptance: float = 1.0
    start: float = 0.0
    num_stages: int = 1
    wrap: Callable[[Scheduler], Scheduler] = lambda scheduler: scheduler


def run_virtually(
    requests: Sequence[SimulatedRequest],
    head: TimelineHeader,
    choices: Choices,
    device: VirtualDevice,
) -> Sequence[TimelineLine]:
    """Serve requests, and return the lines of the timeline.

    Its request `n` is the n-th to arrive, with its index as its id.

    Args:
        requests: requests in the order of arrival; a request that waits for another may stand anywhere.
        head: the sizes of memory, budget and requests.
        choices: the choices of its settings.
        device: the cost, and parts of the engine that depend on it.
    """
    highest = max([_highest_id(request, index) for index, request in enumerate(requests)])
    model = replace(TOY_MODEL, vocab_size=max(highest, FIRST_ID) + 1, eos_token_ids=(END_ID,))
    lengths = {str(index): request.num_output for index, request in enumerate(requests)}
    lines: list[TimelineLine] = []
    clock = VirtualClock(device.start)
    cost = device.cost
    writer = TimelineWriter(head, list, lines.extend, clock)
    executor = SimExecutor(
        cost,
        clock,
        lengths,
        num_stages=device.num_stages,
        acceptance=device.acceptance,
        groups=head.cache.groups,
    )
    plain, pool = build_scheduling(
        choices,
        model,
        head.max_model_len,
        head.cache,
        head.budget,
        device.predictor,
        seconds_by(cost),
        clock,
    )
    launches = {
        size: sum(cost.stages(WorkCounts(increments=size, draws=size), 1)) for size in cost.buckets
    }
    scheduler = device.wrap(
        speculating(choices.drafts, plain, head.budget, launches, device.proposer, clock)
    )
    interval = head.config.check_in_interval
    engine = Engine(
        executor,
        scheduler,
        pool,
        clock=clock,
        sleep=clock.sleep,
        observer=writer,
        check_in_interval=interval,
    )

    def add(index: int, due: float) -> None:
        request = requests[index]
        now = clock.now
        # it came during the iteration that has just ended, and has been waiting since then
        clock.now = due
        params = SamplingParams(max_tokens=request.max_tokens or request.num_output, temperature=0)
        engine.add_request(str(index), _ids(request, index), params, urgency=request.urgency)
        clock.now = now

    arrivals = [request.arrival for request in requests]
    follows = [request.after for request in requests]
    for _ in Drive.in_virtual_time(engine, executor, clock).serve(arrivals, add, follows):
        pass
    writer.flush()
    return lines


def _highest_id(request: SimulatedRequest, index: int) -> int:
    return FIRST_ID + index if isinstance(request.prompt, int) else max(request.prompt)


def _ids(request: SimulatedRequest, index: int) -> Sequence[int]:
    if isinstance(request.prompt, int):
        return [FIRST_ID + index] * request.prompt
    return request.prompt
