"""Measure the host's time for each request and iteration, by scheduler and ordering, on a simulated device."""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from lab.paper.gpt import MODELS, Efficiency
from lab.paper.runs import paper_lengths, poisson
from orca_jax.assembly.choices import ordering_kind
from orca_jax.engine import Engine
from orca_jax.flags import add_number
from orca_jax.helpers.processor import cpu_name
from orca_jax.helpers.reporting import print_table
from orca_jax.policy import API, RequestView
from orca_jax.policy.ordered import Ordered
from orca_jax.policy.scheduler import PolicyScheduler
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import KnownScheduler
from orca_jax.sim.executor import OTHER_ID, SimExecutor, VirtualClock
from orca_jax.tools.bench.feed import Drive
from orca_jax.tools.plan.accelerators import ACCELERATORS
from orca_jax.values.config import ORDERINGS
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams, Urgency

MAX_BS = 32
TOKEN_BUDGET = 512
MODEL = "101B"  # of one stage
EFFICIENCY = Efficiency(memory=0.49, compute=0.40)
RATE = 5.0
"""Requests per second: three fourths of the saturation, as for most servers."""
GOAL_US = 8.0
"""Microseconds of the processor for each request and iteration that no pair should exceed; a policy takes 12."""
# for the ordering by fair shares; every fourth request has a deadline, every second another
# priority
TENANTS = 4


def _chunked(ordering: str, depth: int = 1) -> KnownScheduler:
    return ChunkedScheduler(MAX_BS, TOKEN_BUDGET, ordering_kind(ordering)(), n_workers=depth)


class Arrivals:
    """The order of arrival, as a class from outside."""

    api: ClassVar[int] = API
    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = True

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        """The same for all."""
        return ()


def _policy() -> KnownScheduler:
    """`chunked` with the order of arrival, on the protocol for policies."""
    policy = Ordered(Arrivals())
    return PolicyScheduler(
        policy, "arrivals", max_bs=MAX_BS, token_budget=TOKEN_BUDGET, num_rows=MAX_BS, n_workers=2
    )


PAIRS: Mapping[str, tuple[float, Callable[[], KnownScheduler]]] = {
    "request_level": (0.5, partial(RequestLevelScheduler, MAX_BS)),
    "orca": (RATE, partial(OrcaScheduler, MAX_BS)),
    "orca, two in flight": (RATE, partial(OrcaScheduler, MAX_BS, 2)),
    **{f"chunked, {ordering}": (RATE, partial(_chunked, ordering)) for ordering in ORDERINGS},
    "chunked, fcfs, overlapped": (RATE, partial(_chunked, "fcfs", 2)),
    "chunked, shortest, overlapped": (RATE, partial(_chunked, "shortest", 2)),
    "policy of an order, overlapped": (RATE, _policy),
}
"""By name: requests per second, somewhat below the saturation, and the scheduler."""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_number(parser, "--num-requests", 20_000, "requests of each pair")


def run(args: argparse.Namespace) -> None:
    """Measure each pair of scheduler and ordering; print a table and a line of JSON."""
    if args.num_requests < 1:
        raise ConfigError(
            f"num_requests must be at least 1, got {args.num_requests}", param="num_requests"
        )
    found = measure_all(args.num_requests)
    worst = max([row["us"] for row in found.values()])
    line = {
        "host_time": found,
        "worst_us": worst,
        "goal_us": GOAL_US,
        "num_requests": args.num_requests,
    }
    print(json.dumps({**line, "cpu": cpu_name(), "load_average": os.getloadavg()[0]}), flush=True)


def measure_all(num_requests: int) -> dict[str, Any]:
    """Serve the paper's workload under each pair; print and return microseconds of the processor."""
    gc.collect()
    found = {name: measure(rate, make(), num_requests) for name, (rate, make) in PAIRS.items()}
    shown = {
        name: f"{row['us']:6.2f} us, {row['mean_batch_size']:.1f} in a batch"
        for name, row in found.items()
    }
    worst = max(found, key=lambda name: found[name]["us"])
    print_table(
        f"host time of a request and iteration, {num_requests} requests; at most {GOAL_US:g} us is the goal",
        {**shown, "largest": f"{found[worst]['us']:6.2f} us, {worst}"},
    )
    return found


def measure(rate: float, scheduler: KnownScheduler, num_requests: int) -> dict[str, float]:
    """Serve the workload once: engine, scheduler and simulated device, without the making of the workload."""
    requests = paper_lengths(num_requests, 0)
    arrivals = poisson(rate, num_requests, 0)
    clock = VirtualClock()
    lengths = {str(index): request.num_generated for index, request in enumerate(requests)}
    executor = SimExecutor(MODELS[MODEL].cost(ACCELERATORS["a100-40"], EFFICIENCY), clock, lengths)
    rows = MAX_BS * scheduler.n_workers
    pages = rows * 42  # of 16 tokens: enough for all rows
    n_slots = pages * 16 - rows * 15 if scheduler.traits.has_reservations else None
    pool = RequestPool(
        KVManager((pages,), 16, rows, n_slots), vocab_size=OTHER_ID + 1, max_model_len=1024
    )
    engine = Engine(executor, scheduler, pool, clock=clock)
    prompt = [1] * max([request.num_prompt for request in requests])

    def add(index: int, due: float) -> None:
        num_prompt, generated, _ = requests[index]
        urgency = Urgency(index % 2, str(index % TENANTS), 60.0 if index % 4 == 0 else None)
        params = SamplingParams(generated, ignore_eos=True)
        engine.add_request(str(index), prompt[:num_prompt], params, urgency=urgency)

    start = time.process_time()
    for _ in Drive.in_virtual_time(engine, executor, clock).serve(arrivals, add):
        pass
    seconds = time.process_time() - start
    members = engine.stats.scheduled_requests
    return {
        "us": 1e6 * seconds / members,
        "requests_per_host_second": num_requests / seconds,
        "request_iterations": members,
        "mean_batch_size": engine.stats.mean_batch_size,
    }
