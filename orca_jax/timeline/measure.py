"""Timelines in memory, and their figures."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from orca_jax.helpers.reporting import name_tails, percentile
from orca_jax.timeline.writer import Arrival, End, IterationRecord, TimelineHeader, TimelineLine
from orca_jax.values.errors import ConfigError


@dataclass
class Timeline:
    """The record of one engine: requests by their numbers, iterations in the order of submission."""

    head: TimelineHeader
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    iterations: list[IterationRecord] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)

    @property
    def origin(self) -> float:
        """The time of the first arrival."""
        return min(arrival.at for arrival in self.arrivals.values())

    def add_record(self, record: Arrival | IterationRecord | End) -> None:
        """Add what a line after the head has."""
        match record:
            case Arrival():
                self.arrivals[record.n] = record
            case IterationRecord():
                self.iterations.append(record)
            case End():
                self.ends[record.n] = record


def timeline_of(lines: Sequence[TimelineLine]) -> Timeline:
    """Return the timeline of the lines of one writer, which begin with its head."""
    timeline = Timeline(lines[0]["head"])
    for line in lines[1:]:
        for record in line.values():
            timeline.add_record(record)
    return timeline


def members(iteration: IterationRecord) -> Iterator[tuple[int, int, int]]:
    """Yield (request, position, tokens) of each member."""
    proposed = dict(iteration.proposed or ())
    yield from ((n, start, 1 + proposed.get(n, 0)) for n, start in iteration.increments)
    yield from ((n, start, size) for n, start, size, _ in iteration.chunks)
    yield from iteration.repeats


def side_by_side(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, str]:
    """Return the figures of two timelines in two columns, by the names of the first ones."""
    pairs = zip(first.items(), second.values(), strict=True)
    return {name: f"{one:>12,.4g} {other:>12,.4g}" for (name, one), other in pairs}


def _is_late(timeline: Timeline, n: int) -> bool:
    """True if a request has ended after its deadline."""
    arrival = timeline.arrivals[n]
    return arrival.deadline is not None and timeline.ends[n].at > arrival.at + arrival.deadline


def token_times(timeline: Timeline) -> dict[int, list[float]]:
    """Return the delivery times of the tokens of all ended requests. Tokens past the end of a request are left out."""
    times: dict[int, list[float]] = {n: [] for n in timeline.ends}
    for iteration in timeline.iterations:
        for n, count in _sampled(iteration):
            if n in times:
                count = min(count, timeline.ends[n].generated - len(times[n]))
                times[n] += [iteration.collected] * count
    # nothing is delivered before the whole batch has ended
    if timeline.head.config.scheduler == "request_level":
        return {n: [timeline.ends[n].at] * len(each) for n, each in times.items()}
    return times


def _sampled(iteration: IterationRecord) -> Iterator[tuple[int, int]]:
    """Yield (request, number of sampled ids) of an iteration."""
    if iteration.told is not None:
        yield from iteration.told
        return
    yield from ((n, 1) for n, _ in iteration.increments)
    yield from ((n, 1) for n, _, _, samples in iteration.chunks if samples)


def shown_figures(timeline: Timeline) -> dict[str, float]:
    """Return the figures under names for people: the 99th percentile of few requests is their largest value.

    Raises:
        ConfigError: as in `figures`.
    """
    found = figures(timeline)
    return name_tails(
        found, int(found["requests"]), int(found["output_tokens"] - found["requests"])
    )


def proposals(timeline: Timeline) -> tuple[int, int, int]:
    """Return the number of proposed tokens, of those accepted, and of those with all others before them accepted."""
    proposed = accepted = tested = 0
    for iteration in timeline.iterations:
        told = dict(iteration.told or ())
        for n, count in iteration.proposed or ():
            hits = told.get(n, 1) - 1
            proposed = proposed + count
            accepted = accepted + hits
            tested = tested + min(hits + 1, count)
    return proposed, accepted, tested


def figures(timeline: Timeline) -> Mapping[str, float]:
    """Return latencies, throughput and counts. Only requests that ended with "stop" or "length" are measured.

    Raises:
        ConfigError: there are no such requests.
    """
    times = token_times(timeline)
    served = [
        n
        for n, end in timeline.ends.items()
        if end.reason in ("stop", "length") and times[n] and n in timeline.arrivals
    ]
    if not served:
        raise ConfigError(
            "no request of the timeline has ended, so there is nothing to measure", param="trace"
        )
    arrived = {n: timeline.arrivals[n].at for n in served}
    wall = max(timeline.ends[n].at for n in served) - min(arrived.values())
    latencies = [timeline.ends[n].at - arrived[n] for n in served]
    normalized = [latency / len(times[n]) for n, latency in zip(served, latencies, strict=True)]
    first = [times[n][0] - arrived[n] for n in served]
    gaps: list[float] = []
    for n in served:
        gaps += [after - before for before, after in pairwise(times[n])]
    gaps = gaps or [0.0]
    num_tokens = sum(len(times[n]) for n in served)

    def per_second(number: float) -> float:
        return number / wall if wall else 0.0

    proposed, accepted, _ = proposals(timeline)
    batch = [len(list(members(iteration))) for iteration in timeline.iterations]
    return {
        "requests": len(served),
        "output_tokens": num_tokens,
        "output_tokens_per_s": per_second(num_tokens),
        "requests_per_s": per_second(len(served)),
        "median_latency_ms": 1e3 * statistics.median(latencies),
        "p99_latency_ms": 1e3 * percentile(latencies, 99),
        "median_normalized_latency_ms": 1e3 * statistics.median(normalized),
        "p99_normalized_latency_ms": 1e3 * percentile(normalized, 99),
        "median_ttft_ms": 1e3 * statistics.median(first),
        "p99_ttft_ms": 1e3 * percentile(first, 99),
        "median_inter_token_ms": 1e3 * statistics.median(gaps),
        "p99_inter_token_ms": 1e3 * percentile(gaps, 99),
        "iterations": len(timeline.iterations),
        "mean_batch_size": statistics.fmean(batch),
        "proposed_tokens": proposed,
        "accepted_tokens": accepted,
        "preemptions": sum(len(iteration.preempted) for iteration in timeline.iterations),
        "overruled_decisions": sum(iteration.overruled for iteration in timeline.iterations),
        "late_requests": sum(_is_late(timeline, n) for n in served),
        "cached_tokens": sum(timeline.ends[n].cached for n in served),
        "device_idle_share": per_second(sum(iteration.idle for iteration in timeline.iterations)),
        "wall_s": wall,
    }
