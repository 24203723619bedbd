"""`simulate`: a scheduler with requests and a cost of iterations, in virtual time."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from orca_jax.assembly.choices import MOST_PAGES, MOST_ROWS
from orca_jax.assembly.scheduler import timeline_header
from orca_jax.assembly.support import check_settings
from orca_jax.sim.cost import IterationCost, LinearCost
from orca_jax.timeline.measure import Timeline, figures, members, timeline_of, token_times
from orca_jax.timeline.writer import TimelineLine
from orca_jax.tools.bench.virtual import SimulatedRequest, VirtualDevice, run_virtually
from orca_jax.values.cache_spec import ONE_GROUP, ceil_div
from orca_jax.values.checks import is_class_name, load_class, require
from orca_jax.values.config import CacheConfig, EngineConfig
from orca_jax.values.errors import ConfigError

__all__ = [
    "LinearCost",
    "SimulatedRecord",
    "SimulatedRequest",
    "SimulatedRun",
    "config_with",
    "simulate",
]

PAGE_SIZE = 16
BUDGET = 512  # tokens

type Load = Sequence[SimulatedRequest] | Callable[[random.Random], Sequence[SimulatedRequest]]
"""Requests, or a function that draws them."""


class SimulatedRecord(NamedTuple):
    """A request of a simulation. Times are seconds; those that have not come are None."""

    request: int  # its index in the load
    arrival: float
    prompt: int  # tokens
    output: int  # generated tokens
    tenant: str
    program: str
    started: float | None  # first iteration
    first_token: float | None
    end: float | None
    preemptions: int
    cached: int  # prompt tokens found in the prefix cache
    priority: int
    deadline: float | None  # seconds after the arrival


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a simulation.

    Attributes:
        lines: the lines of the timeline.
        load: the requests.
        device: what took the place of a model.
        again: runs it again with another one.
    """

    lines: Sequence[TimelineLine]
    load: Sequence[SimulatedRequest]
    device: VirtualDevice
    again: Callable[[VirtualDevice], Sequence[TimelineLine]]

    @cached_property
    def timeline(self) -> Timeline:
        """All iterations. Request `n` is the n-th to arrive, and its id is its index in the load."""
        return timeline_of(self.lines)

    @cached_property
    def figures(self) -> Mapping[str, float]:
        """Throughput, latencies and counts, as `orca-jax timeline` prints them."""
        return figures(self.timeline)

    @cached_property
    def records(self) -> list[SimulatedRecord]:
        """The requests in the order of arrival."""
        timeline = self.timeline
        times = token_times(self.timeline)
        started: dict[int, float] = {}
        preemptions = dict.fromkeys(timeline.arrivals, 0)
        for iteration in timeline.iterations:
            for n, _, _ in members(iteration):
                started.setdefault(n, iteration.planned)
            for n in iteration.preempted:
                preemptions[n] += 1
        found = []
        for n, arrival in timeline.arrivals.items():
            end = timeline.ends.get(n)
            index = int(arrival.request_id)
            urgency = self.load[index].urgency
            first = times[n][0] if times.get(n) else None
            numbers = (
                arrival.at,
                arrival.prompt,
                end.generated if end else 0,
                urgency.tenant,
                urgency.program,
            )
            rest = (
                started.get(n),
                first,
                end.at if end else None,
                preemptions[n],
                end.cached if end else 0,
            )
            found.append(
                SimulatedRecord(index, *numbers, *rest, urgency.priority, urgency.deadline)
            )
        return found


def simulate(
    policy: str | type[Any], load: Load, cost: IterationCost, seed: int = 0, **settings: Any
) -> SimulatedRun:
    """Serve requests under a scheduler in virtual time.

    The same arguments give the same run. Pages are enough for all rows, and the longest request is that of the load,
    unless `num_pages` or `max_model_len` is given.

    Args:
        policy: name of a scheduler, FILE.py:CLASS, or a class at the top of its module: a `policy.Policy`, or a
            `policy.Order` or `policy.Retention` for `chunked`.
        load: requests in the order of arrival, or a function that draws them with random numbers of `seed`.
        cost: seconds of an iteration, such as `LinearCost(per_iteration=0.02, per_token=1e-4, per_pair=0.0)`.
        seed: seed of a load that is drawn.
        settings: further settings of `EngineConfig`, such as `max_num_seqs` and `max_num_batched_tokens`.

    Raises:
        ConfigError: a setting or the load is wrong.
        PolicyError: the policy raised an exception, or returned a decision that cannot be applied.
    """
    requests = list(load(random.Random(seed)) if callable(load) else load)
    config = config_with(
        policy, **{"max_num_batched_tokens": BUDGET, "page_size": PAGE_SIZE, **settings}
    )
    lengths = [
        _num_prompt(request) + (request.max_tokens or request.num_output) for request in requests
    ]
    if (
        not requests
        or min([min(_num_prompt(request), request.num_output) for request in requests]) < 1
    ):
        raise ConfigError(
            "a load needs a request, and each of them a token of its prompt and of its output",
            "load",
        )
    choices = check_settings(config)
    longest = config.max_model_len or max(lengths)
    size = config.page_size or PAGE_SIZE
    num_pages = config.num_pages or choices.requests.num_rows * ceil_div(longest + size - 1, size)
    for name, number, most in (
        ("num_pages", num_pages, MOST_PAGES),
        ("max_num_seqs", choices.requests.num_rows, MOST_ROWS),
    ):
        require(
            number <= most, name, f"{name} must be at most {most} in a simulation, got {number}"
        )
    cache = CacheConfig(ONE_GROUP, (num_pages,), size, "float32")
    head = timeline_header(
        config, cache, longest, config.max_num_batched_tokens or BUDGET, cost.buckets
    )

    def again(device: VirtualDevice) -> Sequence[TimelineLine]:
        return run_virtually(requests, head, choices, device)

    device = VirtualDevice(cost, num_stages=config.pipeline_parallel_size)
    return SimulatedRun(again(device), requests, device, again)


def config_with(policy: str | type[Any], **settings: Any) -> EngineConfig:
    """Return settings with a scheduler, an order or a retention, by name or as a class, on a model without a device."""
    name = policy if isinstance(policy, str) else f"{policy.__module__}:{policy.__qualname__}"
    if not isinstance(policy, str) and load_class(name, "scheduler") is not policy:
        load_class.cache_clear()  # a notebook has made the class again
    kind = load_class(name, "scheduler") if is_class_name(name) else None
    methods = {"scheduler": "decide", "scheduling_policy": "key", "retention": "keep"}
    setting = next((each for each, method in methods.items() if hasattr(kind, method)), "scheduler")
    names: dict[str, Any] = {setting: name}
    return EngineConfig(model="preset:toy", **names, **settings)


def _num_prompt(request: SimulatedRequest) -> int:
    if isinstance(request.prompt, int):
        return request.prompt
    return len(request.prompt)
