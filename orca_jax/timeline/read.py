"""A trace as read from its file."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from orca_jax.errors import ConfigError
from orca_jax.reporting import percentile
from orca_jax.timeline.writer import TRACE_VERSION, Arrival, End, Head, Iteration


@dataclass(frozen=True)
class _Line:
    """Exactly one of these."""

    head: Head | None = None
    arrival: Arrival | None = None
    iteration: Iteration | None = None
    end: End | None = None


@dataclass
class Run:
    """One engine's life; requests by their numbers, iterations in the order of submission."""

    head: Head
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    iterations: list[Iteration] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)


def load_run(path: str) -> Run:
    """The last run in a file. Raises ConfigError: there is none, or a line is not a trace's."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error.strerror}", param="trace") from error
    return parse_run(data)


def parse_run(data: bytes) -> Run:
    """The last run in a trace's bytes; an unfinished last line is left out.

    Raises:
        ConfigError: there is no run, or a line is not a trace's.
    """
    decoder = msgspec.json.Decoder(_Line)
    run: Run | None = None
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"line {number} is no line of a trace: {error}", param="trace") from error
        if line.head is not None:
            if line.head.version != TRACE_VERSION:
                message = f"line {number}: version {line.head.version} of the format, and this is {TRACE_VERSION}"
                raise ConfigError(message, param="trace")
            run = Run(line.head)
        elif run is None:
            raise ConfigError(f"line {number} comes before the engine's head; write one with --trace-file", "trace")
        elif line.arrival is not None:
            run.arrivals[line.arrival.n] = line.arrival
        elif line.iteration is not None:
            run.iterations.append(line.iteration)
        elif line.end is not None:
            run.ends[line.end.n] = line.end
    if run is None:
        raise ConfigError("the file holds no trace; write one with --trace-file", param="trace")
    return run


def members(iteration: Iteration) -> Iterator[tuple[int, int, int]]:
    """(request, position, tokens) of everyone in it."""
    yield from ((n, start, 1) for n, start in iteration.increments)
    yield from ((n, start, size) for n, start, size, _ in iteration.chunks)
    yield from iteration.repeats


def token_times(run: Run) -> dict[int, list[float]]:
    """When each generated token of the requests that ended was handed out; what came past an end is left out."""
    times: dict[int, list[float]] = {n: [] for n in run.ends}
    for iteration in run.iterations:
        for n, count in _told(iteration):
            if n in times:
                count = min(count, run.ends[n].generated - len(times[n]))
                times[n] += [iteration.collected] * count
    if run.head.config.scheduler == "request_level":  # nothing is handed out before the whole batch has ended
        return {n: [run.ends[n].at] * len(each) for n, each in times.items()}
    return times


def _told(iteration: Iteration) -> Iterator[tuple[int, int]]:
    """(request, ids) that came with it."""
    if iteration.told is not None:
        yield from iteration.told
        return
    yield from ((n, 1) for n, _ in iteration.increments)
    yield from ((n, 1) for n, _, _, samples in iteration.chunks if samples)


def figures(run: Run) -> Mapping[str, float]:
    """What the run came to. Latencies are of requests that ended as they asked for.

    Raises:
        ConfigError: none did.
    """
    times = token_times(run)
    served = [n for n, end in run.ends.items() if end.reason in ("stop", "length") and times[n] and n in run.arrivals]
    if not served:
        raise ConfigError("no request of the trace ended, so there is nothing to measure", param="trace")
    arrived = {n: run.arrivals[n].at for n in served}
    wall = max(run.ends[n].at for n in served) - min(arrived.values())
    normalized = [(run.ends[n].at - arrived[n]) / len(times[n]) for n in served]
    first = [times[n][0] - arrived[n] for n in served]
    gaps = [after - before for n in served for before, after in zip(times[n], times[n][1:], strict=False)] or [0.0]
    num_tokens = sum(len(times[n]) for n in served)
    batch = [sum(1 for _ in members(iteration)) for iteration in run.iterations]
    return {
        "requests": len(served),
        "output_tokens_per_s": num_tokens / wall if wall else 0.0,
        "requests_per_s": len(served) / wall if wall else 0.0,
        "median_normalized_latency_ms": 1e3 * statistics.median(normalized),
        "p99_normalized_latency_ms": 1e3 * percentile(normalized, 99),
        "median_ttft_ms": 1e3 * statistics.median(first),
        "p99_ttft_ms": 1e3 * percentile(first, 99),
        "median_inter_token_ms": 1e3 * statistics.median(gaps),
        "p99_inter_token_ms": 1e3 * percentile(gaps, 99),
        "iterations": len(run.iterations),
        "mean_batch_size": statistics.fmean(batch),
        "preemptions": sum(len(iteration.preempted) for iteration in run.iterations),
        "cached_tokens": sum(run.ends[n].cached for n in served),
        "device_idle_share": sum(iteration.idle for iteration in run.iterations) / wall if wall else 0.0,
        "wall_s": wall,
    }
