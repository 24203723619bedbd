"""k-LPM between FCFS and LPM (Dexter et al., arXiv 2502.04677, sections 4 and 5): the 99th percentile of the TTFT.

The load is the paper's tree of height two: a beginning that all prompts share, a history for each user, and a document
for each request, so that requests of one user share the most. Some users send more than others. A request draws one
token, and an iteration has one request, so that the time is that of prompts without cached tokens, as in the paper's
model of cost. The cache has room for few histories. Arrivals are Poisson.

The paper measures a server on GPUs with prompts that are not published, so that only the order of the three can be
compared: by the ratios of their 99th percentiles on the same requests, with 95 % intervals over five seeds.

FCFS is behind both. LPM and k-LPM are equal here: all histories are of one length, so when the waiting requests of the
users in the cache have run, the others match equally, and the oldest one is next under LPM too. No request starves:
even the first user sends 4 requests each second, and the device serves 67 that match. Two other loads had the same
result: histories of different lengths, and longer documents of fewer users.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice, product
from typing import Any

from lab.paper.effort import Effort
from lab.policies.prefix_match import PrefixMatch
from lab.reproduce.rows import Row
from lab.shelf.virtual import FIRST_ID, Call, Devices, on_protocol, serve_calls
from orca_jax.helpers.reporting import percentile
from orca_jax.sim.cost import LinearCost

# tokens
SHARED = 64
HISTORY = 256
DOCUMENT = 64
USERS, SKEW = 64, 0.8
"""The n-th user sends a share of the requests in proportion to `n ** -SKEW`."""
ROUNDS: Mapping[str, int | None] = {"fcfs": 1, "lpm": None, "k_lpm": 16}
"""The k of each policy; 16 was the best of 2, 4, 8 and 16 at first sight."""
DEVICES = Devices(
    LinearCost(0.002, 0.0002, 0.0),
    72,
    max_batch=1,
    token_budget=512,
    longest=512,
    reuses_prefixes=True,
)
RATES = (14.0, 17.0, 20.0, 23.0, 26.0)
"""Requests per second. Without any reuse the device serves 12.7, and if only the documents are computed 67."""


def load(rate: float, count: int, seed: int) -> list[Call]:
    """Requests of all users in a random order."""
    dice = random.Random(f"k-lpm-{seed}")
    users = dice.choices(
        range(FIRST_ID, FIRST_ID + USERS), [(n + 1) ** -SKEW for n in range(USERS)], k=count
    )
    calls = []
    for number, (user, at) in enumerate(
        zip(users, accumulate(dice.expovariate(rate) for _ in users), strict=True)
    ):
        document = [FIRST_ID + USERS + 1 + (number >> 8 * place) % 256 for place in range(2)] * (
            DOCUMENT // 2
        )
        prompt = [FIRST_ID + USERS] * SHARED + [user] * HISTORY + document
        calls.append(Call(at, len(prompt), 1, prompt=prompt))
    return calls


def p99(name: str, rate: float, count: int, seed: int) -> float:
    """The 99th percentile of the seconds to the first token, of a run."""
    calls = load(rate, count, seed)
    outcome = serve_calls(
        lambda devices: on_protocol(PrefixMatch(ROUNDS[name]), devices), calls, DEVICES
    )
    return percentile([service.tokens[0] - service.arrival for service in outcome.services], 99)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The ends of the 95 % interval of a mean, by the quantile of Student's t for five values."""
    mean = statistics.fmean(values)
    half = 2.776 * statistics.stdev(values) / len(values) ** 0.5
    return mean - half, mean + half


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """The three at five rates, five seeds each."""
    cases = product(RATES, ROUNDS, range(5))
    runs = [(name, rate, effort.requests // 2, seed) for rate, name, seed in cases]
    values = iter(effort.map(p99, *zip(*runs, strict=True)))
    found = dict[str, Any]()
    rows = list[Row]()
    for rate in RATES:
        each = {policy: list(islice(values, 5)) for policy in ROUNDS}
        found[f"{rate:g}"] = each
        for other in ("fcfs", "lpm"):
            low, high = interval([a / b for a, b in zip(each[other], each["k_lpm"], strict=True)])
            text = f"99th percentile of the TTFT at {rate:g}/s: {other} by k_lpm, 95 % interval"
            rows.append(
                Row(
                    f"k_lpm.{rate:g}.{other}",
                    text,
                    f"{low:.3g} to {high:.3g}",
                    "> 1",
                    holds=low > 1,
                )
            )
    return found, rows
