"""The load of one pass: the requests with their times, and their delivery in an open loop."""

import asyncio
import dataclasses
import itertools
import math
import random
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from orca_jax.tools.bench.online.answers import CallOutcome, read_outcome
from orca_jax.tools.bench.online.exchange import Exchange, exchange
from orca_jax.tools.bench.online.server import RemoteTarget
from orca_jax.tools.bench.online.settings import OpenLoopSettings
from orca_jax.tools.bench.workload.generate import READERS, WorkloadRequest, make_workload
from orca_jax.values.errors import ConfigError

LEAD_SECONDS = 0.05  # between the start of the loop and the first request


@dataclass(frozen=True)
class SentLoad:
    """The outcomes of one pass in the order of arrival, and the share of a core that the client used."""

    planned: Sequence[WorkloadRequest]
    outcomes: Sequence[CallOutcome]
    cpu_share: float


def make_load(
    settings: OpenLoopSettings, rate: float | None, max_model_len: int | None
) -> list[WorkloadRequest]:
    """Make the requests of one pass.

    Args:
        settings: trace, seed and limits.
        rate: requests per second; infinite: all at once; None: the times of the file.
        max_model_len: limit for requests of files; None: no limit.

    Raises:
        ConfigError: as in `make_workload`; `param` names the flag.
    """
    has_times = settings.trace in READERS
    count = settings.num_requests
    times = list[float]()
    if not has_times:
        assert rate is not None
        drawn = islice(arrival_times(rate, settings.burstiness, settings.seed), count)
        limit = math.inf if settings.duration is None else settings.duration
        times = list(takewhile(lambda time: time <= limit, drawn))
        count = len(times)
    elif settings.duration is not None and rate is not None:
        within = math.ceil(rate * settings.duration)
        count = within if count is None else min(count, within)
    workload = make_workload(
        settings.trace,
        num_requests=count,
        vocab_size=settings.vocab_size,
        seed=settings.seed,
        rate=rate if has_times and rate is not None and math.isfinite(rate) else None,
        has_recorded_times=has_times and rate is None,
        max_model_len=settings.max_model_len or max_model_len,
        data=settings.trace_data,
        length_scale=settings.length_scale,
        seconds=settings.duration if has_times and rate is None else None,
    )
    if has_times:
        return workload
    return [
        dataclasses.replace(request, arrival=at)
        for request, at in zip(workload, times, strict=True)
    ]


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds without end, in order; the first one is 0.

    The gaps follow a gamma distribution, as in `vllm bench serve`. Equal seeds give the same pattern at every rate.

    Args:
        rate: requests per second; infinite: all at once.
        burstiness: shape of the distribution. 1: a Poisson process; below 1: bursts; infinite: equal gaps.
        seed: seed of the gaps.
    """
    if math.isinf(rate):
        yield from (0.0 for _ in itertools.count())
    if math.isinf(burstiness):
        yield from (index / rate for index in itertools.count())
    gaps = random.Random(f"arrivals-{seed}")
    now = 0.0
    while True:
        yield now
        now += gaps.gammavariate(burstiness, 1 / (rate * burstiness))


def run_load(target: RemoteTarget, planned: Sequence[WorkloadRequest], timeout: float) -> SentLoad:
    """Send every request at its time, whether earlier ones have ended or not. Answers are parsed at the end."""
    requests = [target.form.encode(request.prompt_ids, request.num_output) for request in planned]
    _allow_open_files(len(planned))

    async def deliver() -> list[Exchange]:
        start = time.monotonic() + LEAD_SECONDS
        async with asyncio.TaskGroup() as group:
            calls = []
            for request, plan in zip(requests, planned, strict=True):
                due = start + plan.arrival
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                calls.append(group.create_task(exchange(target.address, request, due, timeout)))
        return [call.result() for call in calls]

    begin = time.monotonic()
    used = time.process_time()
    calls = asyncio.run(deliver())
    share = (time.process_time() - used) / (time.monotonic() - begin)
    return SentLoad(planned, [read_outcome(call) for call in calls], share)


def _allow_open_files(needed: int) -> None:
    """Raise the soft limit of open files, as far as the system permits. Beyond it, calls fail and are counted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + 100
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def warmup_count(settings: OpenLoopSettings, num_requests: int) -> int:
    """Return the number of first requests without a part in the figures: by default a tenth.

    Raises:
        ConfigError: no request would be left; `param` is "warmup_requests".
    """
    count = num_requests // 10 if settings.warmup_requests is None else settings.warmup_requests
    if count >= num_requests:
        message = (
            f"warmup_requests {count} leaves none of {num_requests} requests to measure; lower it"
        )
        raise ConfigError(message, param="warmup_requests")
    return count
