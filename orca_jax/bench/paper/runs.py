"""Runs of a simulated system at one arrival rate, and their figures as the paper measures them."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from orca_jax.bench.feed import advance, feed
from orca_jax.bench.paper.systems import Place, System, build
from orca_jax.reporting import percentile
from orca_jax.request import SamplingParams

WARM_UP = 0.1
"""The share of the requests, the first to arrive, that are served and not measured."""


class Lengths(NamedTuple):
    """A request: prompt tokens, generated tokens, and the most tokens that it asks for."""

    num_prompt: int
    num_generated: int
    max_tokens: int


def paper_lengths(count: int, seed: int) -> list[Lengths]:
    """The paper's workload: prompts of 32 to 512 tokens, 1 to 128 generated ones, both uniform."""
    dice = random.Random(f"paper-lengths-{seed}")
    drawn = [(dice.randint(32, 512), dice.randint(1, 128)) for _ in range(count)]
    return [Lengths(num_prompt, generated, generated) for num_prompt, generated in drawn]


def homogeneous(num_prompt: int, generated: int, count: int) -> list[Lengths]:
    """Equal requests (Figure 11)."""
    return [Lengths(num_prompt, generated, generated)] * count


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Arrivals. Those of two rates are equal but for the unit of time."""
    dice = random.Random(f"paper-arrivals-{seed}")
    return [at / rate for at in accumulate(dice.expovariate(1.0) for _ in range(count))]


@dataclass(frozen=True)
class RunResult:
    """The measured requests of one run; times in seconds of the virtual clock."""

    throughput: float  # requests that ended per second, from the first measured arrival to the last one
    normalized: Sequence[float]  # latency by generated tokens
    first: Sequence[float]  # to the first token
    gaps: Sequence[float]  # between two tokens; empty without `has_gaps`
    ends: Sequence[float]  # of all requests, those of the warm-up too

    @property
    def point(self) -> tuple[float, float]:
        """Throughput and the median of the normalised latency in ms per token: a point of Figure 10."""
        return self.throughput, 1e3 * statistics.median(self.normalized)

    @property
    def figures(self) -> dict[str, float]:
        """The paper's two figures, and those of later serving systems in milliseconds."""
        throughput, median = self.point
        found = {"requests_per_s": throughput, "median_normalized_latency_ms": median}
        found["p99_normalized_latency_ms"] = 1e3 * percentile(self.normalized, 99)
        for name, values in (("ttft", self.first), ("itl", self.gaps)):
            if values:
                found[f"p50_{name}_ms"] = 1e3 * percentile(values, 50)
                found[f"p99_{name}_ms"] = 1e3 * percentile(values, 99)
        return found


def simulate(
    system: System, place: Place, requests: Sequence[Lengths], arrivals: Sequence[float], *, has_gaps: bool = False
) -> RunResult:
    """Serve all requests, and measure those after the warm-up.

    Raises:
        ConfigError: the model or the system does not fit into the memory.
    """
    lengths = {str(index): request.num_generated for index, request in enumerate(requests)}
    engine, executor, clock = vars(build(system, place, lengths)).values()
    prompt = [1] * max([request.num_prompt for request in requests])
    ends = [0.0] * len(requests)
    firsts = [0.0] * len(requests)
    gaps: list[float] = []
    last: dict[str, float] = {}

    def add(index: int) -> None:
        request = requests[index]
        params = SamplingParams(request.max_tokens, ignore_eos=request.num_generated == request.max_tokens)
        engine.add(str(index), prompt[: request.num_prompt], params)

    num_warm = int(WARM_UP * len(requests))
    for updates in feed(engine, arrivals, add, clock, partial(advance, clock), executor.wait_until):
        now = clock.now
        for update in updates:
            if has_gaps and int(update.request_id) >= num_warm:
                name = update.request_id
                gaps += [now - last.get(name, now)] * (name in last) + [0.0] * (len(update.new_ids) - 1)
                last[name] = now
            if update.metrics is None:
                continue
            index = int(update.request_id)
            firsts[index] = firsts[index] or now
            if update.finish_reason is not None:
                ends[index] = now
    return _measured(requests, arrivals, firsts, ends, gaps, num_warm)


def _measured(
    requests: Sequence[Lengths],
    arrivals: Sequence[float],
    firsts: Sequence[float],
    ends: Sequence[float],
    gaps: Sequence[float],
    num_warm: int,
) -> RunResult:
    begin, end = arrivals[num_warm], arrivals[-1]
    measured = range(num_warm, len(requests))
    done = sum([begin <= at < end for at in ends])
    return RunResult(
        throughput=done / (end - begin) if end > begin else 0.0,
        normalized=[(ends[n] - arrivals[n]) / requests[n].num_generated for n in measured],
        first=[firsts[n] - arrivals[n] for n in measured],
        gaps=gaps,
        ends=ends,
    )
