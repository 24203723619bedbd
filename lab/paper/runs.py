"""Runs of an engine at one arrival rate, in virtual or real time, and their figures as the paper measures them."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from orca_jax.helpers.reporting import percentile
from orca_jax.tools.bench.feed import Drive
from orca_jax.values.request import SamplingParams

WARM_UP = 0.1
"""The share of the requests, the first to arrive, that are served and not measured."""


class Lengths(NamedTuple):
    """A request: prompt tokens, generated tokens, and the most tokens that it asks for."""

    num_prompt: int
    num_generated: int
    max_tokens: int


def paper_lengths(count: int, seed: int, scale: float = 1.0) -> list[Lengths]:
    """The paper's workload: prompts of 32 to 512 tokens, 1 to 128 generated ones, both uniform.

    The four bounds are multiplied by `scale` and rounded, to at least 1.
    """
    dice = random.Random(f"paper-lengths-{seed}")
    bounds = [scaled(bound, scale) for bound in (32, 512, 1, 128)]
    drawn = [(dice.randint(*bounds[:2]), dice.randint(*bounds[2:])) for _ in range(count)]
    return [Lengths(num_prompt, generated, generated) for num_prompt, generated in drawn]


def scaled(length: int, scale: float) -> int:
    """A length for a model with another context than the paper's."""
    return max(1, round(scale * length))


def homogeneous(num_prompt: int, generated: int, count: int) -> list[Lengths]:
    """Equal requests (Figure 11)."""
    return [Lengths(num_prompt, generated, generated)] * count


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Arrivals. Those of two rates are equal but for the unit of time."""
    dice = random.Random(f"paper-arrivals-{seed}")
    gaps = [dice.expovariate(1.0) for _ in range(count)]
    return [at / rate for at in accumulate(gaps)]


@dataclass(frozen=True)
class RunResult:
    """The measured requests of one run; times in seconds of the virtual clock."""

    begin: float  # the first measured arrival
    # requests that ended per second, from the first measured arrival to the last one
    throughput: float
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


def serve(
    drive: Drive,
    requests: Sequence[Lengths],
    prompts: Sequence[Sequence[int]],
    arrivals: Sequence[float],
    *,
    has_gaps: bool = False,
) -> RunResult:
    """Serve all requests in an open loop, and measure those after the warm-up.

    A request arrives at its time, also if the engine takes it later. The clock is read once for the updates of an
    iteration.
    """
    engine = drive.engine
    clock = drive.clock
    ends = [0.0] * len(requests)
    firsts = [0.0] * len(requests)
    gaps: list[float] = []
    last: dict[str, float] = {}

    def add(index: int, due: float) -> None:
        request = requests[index]
        params = SamplingParams(
            request.max_tokens,
            temperature=0.0,
            ignore_eos=request.num_generated == request.max_tokens,
        )
        engine.add_request(str(index), prompts[index], params)

    num_warm = int(WARM_UP * len(requests))
    for updates in drive.serve(arrivals, add):
        now = clock()
        for update in updates:
            assert update.error is None, update.error
            if has_gaps and int(update.request_id) >= num_warm and update.new_ids:
                name = update.request_id
                gaps += [now - last.get(name, now)] * (name in last) + [0.0] * (
                    len(update.new_ids) - 1
                )
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
    begin = arrivals[num_warm]
    end = arrivals[-1]
    measured = range(num_warm, len(requests))
    done = sum([begin <= at < end for at in ends])
    return RunResult(
        begin=begin,
        throughput=done / (end - begin) if end > begin else 0.0,
        normalized=[(ends[n] - arrivals[n]) / requests[n].num_generated for n in measured],
        first=[firsts[n] - arrivals[n] for n in measured],
        gaps=gaps,
        ends=ends,
    )
