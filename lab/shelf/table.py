"""All policies of the shelf on equal loads, in virtual time: one table.

Each load comes at 0.7, 0.9 and 1.1 of the saturation of `chunked` in the order of arrival, with three seeds. The spread
beside a value is half the difference between the largest and the smallest one of the seeds.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from lab.paper.effort import Effort
from lab.policies.ewsjf import Ewsjf
from lab.policies.mc_sf import McSf, SortedF
from lab.policies.orca import Orca
from lab.policies.plas import Plas
from lab.policies.pools import Pools
from lab.policies.prefill_first import PrefillFirst
from lab.policies.prefix_match import PrefixMatch
from lab.policies.sagesched import SageSched
from lab.policies.sarathi import Sarathi
from lab.policies.skip_join_mlfq import SkipJoinMlfq
from lab.policies.srpt import Srpt
from lab.policies.vtc import VirtualTokenCounter
from lab.shelf.fairness import gap
from lab.shelf.loads import DEVICE, DEVICES, MODEL, load
from lab.shelf.virtual import Call, Outcome, Service, on_protocol, serve_calls
from orca_jax.helpers.reporting import percentile
from orca_jax.policy import Policy
from orca_jax.policy.kinds import made, policy_kind
from orca_jax.sched.predict import EnginePredictor, RunningQuantiles
from orca_jax.values.checks import is_class_name
from orca_jax.values.errors import ConfigError

RESULT = Path(__file__).parents[1] / "results" / "shelf.json"
POLICIES: Mapping[str, Callable[[], Policy]] = {
    "orca": Orca,
    "prefill_first": PrefillFirst,
    "sarathi": Sarathi,
    "vtc": VirtualTokenCounter,
    "lpm": PrefixMatch,
    "k_lpm": lambda: PrefixMatch(16),
    "skip_join_mlfq": SkipJoinMlfq,
    "plas": Plas,
    "srpt": Srpt,
    "srpt_quantiles": Srpt,
    "srpt_noisy": lambda: Srpt(noise=0.5),
    "mc_sf": McSf,
    "sorted_f": SortedF,
    "sagesched": SageSched,
    "ewsjf": Ewsjf,
    "pools": lambda: Pools(DEVICES.max_batch),
}
PREDICTORS: Mapping[str, Callable[[], EnginePredictor]] = {"srpt_quantiles": RunningQuantiles}
"""The others know the lengths."""
WHOLE = frozenset({"orca", "prefill_first", "mc_sf", "sorted_f", "pools"})
"""These compute a prompt in one iteration, so that an iteration has room for the longest one."""
LOADS = (0.7, 0.9, 1.1)
SEEDS = (0, 1, 2)
PATIENCE, READING = 1.0, 4.8
"""A reader of the QoE expects the first token after so many seconds, and then so many tokens per second."""
COLUMNS = {
    "requests_per_s": "requests/s",
    "p50_ttft_ms": "TTFT, ms: p50",
    "p99_ttft_ms": "p99",
    "p50_gap_ms": "gap, ms: p50",
    "p99_gap_ms": "p99",
    "p50_normalized_ms": "ms/token: p50",
    "p99_normalized_ms": "p99",
    "jain": "Jain",
    "service_gap": "service gap",
    "qoe": "QoE",
    "evictions": "preemptions",
    "again": "computed twice, %",
}
"""Titles of the figures."""


def measured(
    names: Sequence[str],
    count: int,
    traces: Path | None,
    effort: Effort,
    policies: Sequence[str] = tuple(POLICIES),
) -> dict[str, Any]:
    """The figures of policies on the loads of these names."""
    loads = list(product(names, SEEDS))
    tops = effort.map(saturation, *zip(*[(*each, count, traces) for each in loads], strict=True))
    points = [(*each, top) for each, top in zip(loads, tops, strict=True)]
    cases = product(points, LOADS, policies)
    runs = [(policy, *point, level) for point, level, policy in cases]
    found = effort.map(measure, *zip(*[(*each, count, traces) for each in runs], strict=True))
    table: dict[str, Any] = {}
    for (policy, name, _, _, level), figures in zip(runs, found, strict=True):
        columns = (
            table.setdefault(name, {})
            .setdefault(f"{level:g}", {})
            .setdefault(policy, {key: [] for key in figures})
        )
        for key, value in figures.items():
            columns[key].append(value)
    return {
        "model": MODEL,
        "device": DEVICE,
        "requests": count,
        "seeds": len(SEEDS),
        "loads": table,
    }


def saturation(name: str, seed: int, count: int, traces: Path | None) -> float:
    """Requests per second of `chunked`, if all of them wait at the beginning."""
    calls = [
        call._replace(arrival=0.0, after=None) for call in load(name, 1e9, count, seed, traces)
    ]
    services = serve_calls(lambda devices: on_protocol(Sarathi(), devices), calls, DEVICES).services
    return count / max([service.end for service in services])


def measure(
    policy: str, name: str, seed: int, top: float, level: float, count: int, traces: Path | None
) -> dict[str, float]:
    """The figures of a run at a multiple of the saturation."""
    calls = load(name, level * top, count, seed, traces)
    devices = DEVICES._replace(token_budget=DEVICES.longest) if policy in WHOLE else DEVICES
    make = maker(policy)
    outcome = serve_calls(
        lambda limits: on_protocol(make(), limits), calls, devices, PREDICTORS.get(policy)
    )
    return figures_of(calls, outcome)


def maker(policy: str) -> Callable[[], Policy]:
    """The maker of a policy of the shelf, or of one from outside: FILE.py:CLASS.

    Raises:
        ConfigError: there is no such policy.
    """
    if policy in POLICIES:
        return POLICIES[policy]
    if not is_class_name(policy):
        message = f"policy must be FILE.py:CLASS or one of {', '.join(POLICIES)}, got {policy!r}"
        raise ConfigError(message, param="policy")
    return partial(made, policy_kind(policy, None).kind, "scheduler")


def figures_of(calls: Sequence[Call], outcome: Outcome) -> dict[str, float]:
    """The figures of `COLUMNS`."""
    services = outcome.services
    begin = min([each.arrival for each in services])
    end = max([each.end for each in services])
    tokens = sum([call.num_prompt + call.num_generated for call in calls])
    found = {"requests_per_s": len(calls) / (end - begin), **latencies(services)}
    found["jain"] = jain(calls, [each.normalized for each in services])
    found["service_gap"] = (
        gap(calls, outcome) if {call.tenant for call in calls} == {"A", "B"} else 0.0
    )
    found["qoe"] = statistics.fmean(map(on_time, services))
    return found | {"evictions": outcome.evictions, "again": 100 * outcome.tokens_again / tokens}


def latencies(services: Sequence[Service]) -> dict[str, float]:
    """Percentiles of the TTFT, the gaps between tokens and the normalised latency, in ms."""
    values = {
        "ttft": [each.tokens[0] - each.arrival for each in services],
        "gap": list(chain.from_iterable(each.gaps for each in services)) or [0.0],
        "normalized": [each.normalized for each in services],
    }
    found = {}
    for key, seconds in values.items():
        for share in (50, 99):
            found[f"p{share}_{key}_ms"] = 1e3 * percentile(seconds, share)
    return found


def jain(calls: Sequence[Call], normalized: Sequence[float]) -> float:
    """Jain's index of the mean normalised latencies of clients or programs: 1 if all are equal, 1/n if one has all."""
    of = dict[str, list[float]]()
    for call, value in zip(calls, normalized, strict=True):
        of.setdefault(call.tenant, []).append(value)
    means = [statistics.fmean(values) for values in of.values()]
    return sum(means) ** 2 / (len(means) * sum([mean**2 for mean in means]))


def on_time(service: Service) -> float:
    """The share of the tokens that came before the reader expected them."""
    first = service.arrival + PATIENCE
    return statistics.fmean(
        [at <= first + number / READING for number, at in enumerate(service.tokens)]
    )


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the range."""
    return statistics.fmean(values), (max(values) - min(values)) / 2


def row_of(policy: str, figures: Mapping[str, Sequence[float]], keys: Iterable[str]) -> list[str]:
    """The row of a policy with the figures of these names, whose cells do not break."""
    return [f"`{policy}`", *[shown(figures[key]).replace(" ", "\u00a0") for key in keys]]


def shown(values: Sequence[float]) -> str:
    """Mean and half the range, as far as digits mean something."""
    mean, half = mean_and_half(values)
    digits = max(0, 2 - math.floor(math.log10(mean))) if mean else 0
    spread = f" ± {half:,.{digits}f}" if round(half, digits) else ""
    return f"{mean:,.{digits}f}{spread}"
