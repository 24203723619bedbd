"""Stability (Li, Dai and Peng, arXiv 2504.07347): the largest load under which the number of requests does not grow.

The paper proves that work-conserving schedulers, such as ORCA's and Sarathi-Serve's, are stable if and only if
`rate * (prompt tokens + output tokens) < b / t(b)`, with the budget b of tokens and the seconds t(b) of a full
iteration, and that FasterTransformer and vanilla vLLM are not stable up to this bound. The time of an iteration depends
on its tokens alone, by the paper's form `t(n) = c + a * max(0, n - n0)`.

Rows and memory do not bind. The numbers of this form, and lengths, are ours: they are the constants of the module. A
request computes one token less than it has, since its last one is not processed; the bound counts the computed ones. A
batch of `request_level` is as large as fills the budget with prompts. Arrivals are Poisson, with half of them in each
half of the time, so that the growth is not that of the arrivals.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lab.paper.effort import Effort
from lab.policies.orca import Orca
from lab.policies.prefill_first import PrefillFirst
from lab.policies.sarathi import Sarathi
from lab.reproduce.rows import Row
from lab.shelf.virtual import Call, Devices, Maker, on_protocol, serve_calls
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sim.cost import WorkCounts

BUDGET = 512
PROMPTS, OUTPUTS = (8, 24), (8, 24)  # uniform
MEAN_TOKENS = 16 + 16 - 1
ROWS = 8192
GROWS = 0.02
"""The share of the arrivals by which the number of requests grows, above which a system counts as unstable."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class BatchCost:
    """Seconds of an iteration by its tokens alone."""

    fixed: float = 0.045  # c, seconds
    per_token: float = 0.0003  # a, seconds
    free: int = 64  # n0, tokens
    host: float = 0.0
    buckets: tuple[int, ...] = ()

    def seconds(self, num_tokens: int) -> float:
        """The seconds of so many tokens."""
        return self.fixed + self.per_token * max(0, num_tokens - self.free)

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """The seconds, on one device."""
        return [self.seconds(work.num_tokens)]


COST = BatchCost()
BOUND = BUDGET / COST.seconds(BUDGET) / MEAN_TOKENS
"""Requests per second."""
SYSTEMS: Mapping[str, Maker] = {
    "orca": lambda devices: on_protocol(Orca(), devices),
    "chunked": lambda devices: on_protocol(Sarathi(), devices),
    "prefill_first": lambda devices: on_protocol(PrefillFirst(BUDGET), devices),
    "request_level": lambda devices: RequestLevelScheduler(BUDGET // 16, 1, BUDGET // 16),
}
LOADS: Mapping[str, Sequence[float]] = {
    "orca": (0.95, 1.05),
    "chunked": (0.95, 1.05),
    "prefill_first": (0.5, 0.9),
    "request_level": (0.15, 0.4),
}
"""Multiples of the bound: the first without growth, the second with it."""


def growth(system: str, load: float, count: int, seed: int) -> float:
    """The growth of the number of requests in the second half of the arrivals, as a share of these arrivals."""
    dice = random.Random(f"stability-{seed}")
    half = count // 2 / (load * BOUND)
    earlier = sorted(dice.uniform(0, half) for _ in range(count // 2))
    later = sorted(dice.uniform(0, half) for _ in range(count // 2))
    arrivals = [*earlier, *(half + at for at in later)]
    calls = [Call(at, dice.randint(*PROMPTS), dice.randint(*OUTPUTS)) for at in arrivals]
    devices = Devices(
        COST, 4 * ROWS, max_batch=BUDGET, token_budget=BUDGET, num_rows=ROWS, longest=64
    )
    if system == "request_level":
        devices = devices._replace(num_rows=None)
    services = serve_calls(SYSTEMS[system], calls, devices).services

    def present(when: float) -> int:
        return sum([service.arrival <= when < service.end for service in services])

    return (present(2 * half) - present(half)) / (count // 2)


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """The growth of each system below and above its stated loads."""
    points = list[tuple[str, float]]()
    for system, loads in LOADS.items():
        points += [(system, load) for load in loads]
    runs = [(*point, 5 * effort.requests, seed) for point, seed in product(points, SEEDS)]
    values = effort.map(growth, *zip(*runs, strict=True))
    found = dict[str, Any]()
    rows = list[Row]()
    for number, (system, load) in enumerate(points):
        each = values[number * len(SEEDS) : (number + 1) * len(SEEDS)]
        mean = statistics.fmean(each)
        found[f"{system}({load:g})"] = each
        grows = load == LOADS[system][1]
        text = f"growth at {load:g} of the bound, share of the arrivals: {system}"
        rows.append(
            Row(f"stability.{system}.{load:g}", text, mean, f"> {GROWS}" if grows else f"< {GROWS}",
                holds=(mean > GROWS) == grows)
        )  # fmt: skip
    return {"bound_requests_per_s": BOUND, "growth": found}, rows
