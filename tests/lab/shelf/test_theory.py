"""Virtual time beside the theory of queues: one place in a batch, no overlap, and a known answer."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from lab.policies.plas import Plas
from lab.policies.sarathi import Sarathi
from lab.policies.srpt import Srpt
from lab.shelf.virtual import Call, Devices, Outcome, on_protocol, serve_calls
from orca_jax.policy import Policy
from orca_jax.sim.cost import LinearCost, WorkCounts


@dataclass
class DrawnCost:
    """The seconds of the iterations, one after another."""

    seconds: Sequence[float]
    host: float = 0.0
    buckets: tuple[int, ...] = ()
    used: list[WorkCounts] = field(default_factory=list)

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        self.used.append(work)
        return [self.seconds[len(self.used) - 1]]


def poisson(dice: random.Random, rate: float, count: int) -> list[float]:
    at, arrivals = 0.0, []
    for _ in range(count):
        at += dice.expovariate(rate)
        arrivals.append(at)
    return arrivals


def queue(arrivals: Sequence[float], services: Sequence[float]) -> Outcome:
    """A run whose requests take an iteration each."""
    calls = [Call(at, 1, 1) for at in arrivals]
    devices = Devices(DrawnCost(services), 8, max_batch=1)
    return serve_calls(lambda limits: on_protocol(Sarathi(), limits), calls, devices)


def is_in_interval(values: Sequence[float], expected: float, width: float = 0.0) -> bool:
    """True if a value is in the 99 % interval of a mean of 20 (normal enough for its t), widened by `width`."""
    assert len(values) == 20
    half = 2.861 * statistics.stdev(values) / 20**0.5 + width
    return abs(statistics.fmean(values) - expected) <= half


SERVICES: dict[str, tuple[Callable[[random.Random], float], float]] = {
    "M/M/1": (lambda dice: dice.expovariate(1.0), 2.0),
    "M/D/1": (lambda dice: 1.0, 1.0),
    "M/U/1": (lambda dice: dice.uniform(0, 2), 4 / 3),
}
"""Services with a mean of 1, and their second moments."""


@pytest.mark.parametrize("name", SERVICES)
def test_ends_are_those_of_lindley_and_the_mean_is_that_of_pollaczek_and_khinchine(
    name: str,
) -> None:
    draw, second = SERVICES[name]
    load, means = 0.6, []
    for seed in range(20):
        dice = random.Random(f"{name}-{seed}")
        arrivals = poisson(dice, load, 250)
        services = [draw(dice) for _ in arrivals]
        outcome, end = queue(arrivals, services), 0.0
        for arrival, service, found in zip(arrivals, services, outcome.services, strict=True):
            end = max(arrival, end) + service
            assert found.end == pytest.approx(end, abs=1e-9)
        means.append(
            statistics.fmean([found.end - found.arrival for found in outcome.services[50:]])
        )
    assert is_in_interval(means, 1 + load * second / (2 * (1 - load)))


SIZES = {1: 0.5, 4: 0.3, 16: 0.2}
"""Iterations of a job, and their chances: a mean of 4.9."""
LOAD = 0.7
RATE = LOAD / sum([size * chance for size, chance in SIZES.items()])


def latencies(policy: Callable[[], Policy]) -> list[float]:
    """The mean latencies of 20 runs, in iterations."""
    means = []
    for seed in range(20):
        dice = random.Random(f"sizes-{seed}")
        sizes = dice.choices(list(SIZES), list(SIZES.values()), k=150)
        calls = [
            Call(at, 1, size, tenant=str(number))
            for number, (at, size) in enumerate(zip(poisson(dice, RATE, 150), sizes, strict=True))
        ]
        devices = Devices(LinearCost(1.0, 0.0, 0.0), 400, max_batch=1, num_rows=100, longest=32)
        outcome = serve_calls(lambda limits: on_protocol(policy(), limits), calls, devices)
        assert not outcome.evictions and not outcome.tokens_again
        means.append(statistics.fmean([each.end - each.arrival for each in outcome.services[30:]]))
    return means


def schrage_miller() -> float:
    """The mean latency of SRPT for the sizes, with interruptions at any time."""
    total = 0.0
    for size, chance in SIZES.items():
        below = RATE * sum([s * p for s, p in SIZES.items() if s < size])
        upto = RATE * sum([s * p for s, p in SIZES.items() if s <= size])
        second = sum([p * min(s, size) ** 2 for s, p in SIZES.items()])
        wait = RATE * second / (2 * (1 - below) * (1 - upto))
        shorter = [
            RATE * sum([s * p for s, p in SIZES.items() if s < left]) for left in range(1, size + 1)
        ]
        total += chance * (wait + sum([1 / (1 - each) for each in shorter]))
    return total


def least_attained() -> float:
    """The mean latency of least attained service."""
    total = 0.0
    for size, chance in SIZES.items():
        load = RATE * sum([p * min(s, size) for s, p in SIZES.items()])
        second = sum([p * min(s, size) ** 2 for s, p in SIZES.items()])
        total += chance * (RATE * second / (2 * (1 - load) ** 2) + size / (1 - load))
    return total


@pytest.mark.slow
def test_shortest_remaining_time_meets_schrage_and_miller() -> None:
    """Interruptions wait for the end of an iteration, so the mean may differ by one."""
    found = latencies(Srpt)
    assert is_in_interval(found, schrage_miller(), 1.0)
    assert not is_in_interval(latencies(Sarathi), schrage_miller(), 1.0), "other orders do not"


@pytest.mark.slow
def test_least_attained_service_meets_its_formula() -> None:
    assert is_in_interval(latencies(lambda: Plas(None)), least_attained(), 1.0)


def test_requests_in_the_engine_are_those_of_little() -> None:
    """Arrivals in whole seconds, iterations of one: N by samples of the engine is the rate times W of the updates."""
    dice = random.Random("little")
    calls = [
        Call(float(int(at)), dice.randint(1, 40), dice.randint(1, 12))
        for at in poisson(dice, 0.7, 300)
    ]
    devices = Devices(LinearCost(1.0, 0.0, 0.0), 100, max_batch=5, token_budget=64)
    outcome = serve_calls(lambda limits: on_protocol(Sarathi(), limits), calls, devices)
    area = sum([(end - begin) * number for begin, end, number in outcome.samples])
    assert area == pytest.approx(
        sum([each.end - each.arrival for each in outcome.services]), abs=1e-6
    )
    assert max(number for _, _, number in outcome.samples) > 5, "some of them waited"
