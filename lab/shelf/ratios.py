"""Ratios of other papers, whose testbeds are not here: ours on one simulated device, with the reason for a difference.

- Sarathi-Serve (arXiv 2403.02310, section 5.1): the largest rate at which the 99th percentile of the time between
  tokens is within a target and the median scheduling delay within 2 s. Here the device is `loads.DEVICES`, the lengths
  are those of Azure's conversations in the mean, and the target is five iterations of a full batch, as their strict
  one. Their 2.6 is of Mistral-7B on an A100 with vLLM 0.2, whose prompts come in iterations of their own
  (`prefill_first`), with the prompts of two data sets.
- FastServe (arXiv 2305.05920, section 6): the mean normalised latency of FCFS by that of skip-join MLFQ, on outputs
  with a long tail at 0.9 of the saturation. Their 31.4 (preprint) and 6.1 (NSDI) are ratios of throughput under a
  latency target on many GPUs, with a proactive swap that is not here.
- Autellix (arXiv 2502.13965, section 6): the mean latency of a program under FCFS by that under PLAS at 0.9 of the
  saturation. Their 4 to 15 are ratios of throughput at equal latency, on recorded agents; ours are synthetic.
- SRPT: the mean latency under FCFS by that under SRPT with true lengths, with those of running quantiles, and with
  noise of half a unit of the logarithm, on the ORCA paper's lengths at 0.9 of the saturation.
  TRAIL reports 1.66 to 2.01 with predictions from a model's hidden layers.

- SageSched (arXiv 2603.07917): the mean latency under the best of FCFS, skip-join MLFQ and SRPT with running quantiles,
  by that under SageSched, on the outputs with a long tail. The abstract says 28.7 % without naming the baseline.
- EWSJF (arXiv 2601.21758): a fifth of the requests has prompts of 1,024 to 1,536 tokens, the others 32 to 128. Requests
  per second by those under FCFS with all at once (the paper: 30 % more), and the mean TTFT of the short ones under FCFS
  by that under EWSJF, the largest of three loads (the paper: up to 4 times shorter).

All of ours have 16 places in a batch and 128 rows, so that a request can be paused without losing its pages.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice, product
from typing import Any

from lab.paper.effort import Effort
from lab.paper.gpt import LONGEST
from lab.policies.ewsjf import Ewsjf
from lab.policies.plas import Plas
from lab.policies.prefill_first import PrefillFirst
from lab.policies.sagesched import SageSched
from lab.policies.sarathi import Sarathi
from lab.policies.skip_join_mlfq import SkipJoinMlfq
from lab.policies.srpt import Srpt
from lab.reproduce.rows import Row
from lab.shelf.loads import DEVICES, agents, load
from lab.shelf.virtual import Call, Outcome, on_protocol, serve_calls
from orca_jax.helpers.reporting import percentile
from orca_jax.policy import Policy
from orca_jax.sched.predict import RunningQuantiles
from orca_jax.sim.cost import WorkCounts

PLAIN = DEVICES._replace(reuses_prefixes=False, max_batch=16, num_rows=128)
LOAD = 0.9
LOADS = (0.7, 0.9, 1.1)
MEAN_PROMPT, MEAN_OUTPUT = 1024, 211
SHORT = (32, 128)
LONG = (1024, 1536)
SHARE_OF_LONG = 0.2
PAPERS = {
    "sarathi": "2.6 (Mistral-7B, A100)",
    "fastserve": "6.1 to 31.4 (throughput)",
    "autellix": "4 to 15 (throughput)",
    "srpt": "not a paper's",
    "srpt_quantiles": "1.66 to 2.01 (TRAIL)",
    "srpt_noisy": "not a paper's",
}
CLAIMS = {
    "sagesched": (1.287, "mean latency under the best of three others, over SageSched's"),
    "ewsjf.rate": (1.3, "requests/s of EWSJF with all at once, over those of FCFS"),
    "ewsjf.ttft": (
        4.0,
        "mean TTFT of short requests under FCFS, over EWSJF's, the largest of three loads",
    ),
}
"""Least ratios that papers claim, and what they are."""


def run(policy: Policy, calls: Sequence[Call], predicts: bool = False) -> Outcome:
    """A run on the device without prefix caching."""
    limits = PLAIN._replace(token_budget=LONGEST) if isinstance(policy, PrefillFirst) else PLAIN
    return serve_calls(
        lambda devices: on_protocol(policy, devices),
        calls,
        limits,
        RunningQuantiles if predicts else None,
    )


def rate_of(calls: Sequence[Call]) -> float:
    """The saturation under chunks in the order of arrival: requests per second with all at once."""
    return len(calls) / max([service.end for service in run(Sarathi(), calls).services])


def capacity(policy: type[Policy], count: int, seed: int) -> float:
    """The largest rate within Sarathi-Serve's targets, by bisection to 3 %."""
    dice = random.Random(f"capacity-{seed}")
    gaps = list(accumulate(dice.expovariate(1.0) for _ in range(count)))
    shapes = [
        (
            min(1500, 64 + int(dice.expovariate(1 / MEAN_PROMPT))),
            min(500, 1 + int(dice.expovariate(1 / MEAN_OUTPUT))),
        )
        for _ in range(count)
    ]
    work = WorkCounts(
        increments=PLAIN.max_batch, context=PLAIN.max_batch * MEAN_PROMPT, members=PLAIN.max_batch
    )
    target = 5 * PLAIN.cost.stages(work, 1)[0]

    def is_within(rate: float) -> bool:
        calls = [Call(at / rate, *shape) for at, shape in zip(gaps, shapes, strict=True)]
        services = run(policy(), calls).services
        between = list(chain.from_iterable(service.gaps for service in services))
        delays = [service.tokens[0] - service.arrival for service in services]
        return percentile(between, 99) <= target and statistics.median(delays) <= 2

    low, high = 0.05, 10.0
    while high > 1.03 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low


def normalised(calls: Sequence[Call], outcome: Outcome) -> float:
    """The mean latency of a generated token."""
    pairs = zip(calls, outcome.services, strict=True)
    return statistics.fmean(
        [(service.end - service.arrival) / call.num_generated for call, service in pairs]
    )


def latency(outcome: Outcome) -> float:
    """The mean latency of a request."""
    return statistics.fmean([service.end - service.arrival for service in outcome.services])


def of_programs(calls: Sequence[Call], outcome: Outcome) -> float:
    """The mean time from the first call of a program to the end of its last one."""
    spans = dict[str, tuple[float, float]]()
    for call, service in zip(calls, outcome.services, strict=True):
        begin, _ = spans.get(call.tenant, (service.arrival, 0.0))
        spans[call.tenant] = begin, service.end
    return statistics.fmean([end - begin for begin, end in spans.values()])


def tailed(rate: float, count: int, seed: int) -> list[Call]:
    """Requests with outputs of a long tail, Pareto with the exponent 1.5 from 8 tokens on, cut at 1,024."""
    dice = random.Random(f"tail-{seed}")
    at = 0.0
    calls = list[Call]()
    for _ in range(count):
        at += dice.expovariate(1.0) / rate
        calls.append(
            Call(at, dice.randint(32, 256), min(1024, int(8 * dice.paretovariate(1.5))), 1024)
        )
    return calls


def ratio(name: str, count: int, seed: int) -> float:
    """Our ratio of a paper, on the requests of one seed; above 1 is better than the baseline."""
    if name == "sarathi":
        return capacity(Sarathi, count // 4, seed) / capacity(PrefillFirst, count // 4, seed)
    if name == "fastserve":
        calls = tailed(LOAD * rate_of(tailed(1e9, count, seed)), count, seed)
        return normalised(calls, run(Sarathi(), calls)) / normalised(
            calls, run(SkipJoinMlfq(), calls)
        )
    if name == "autellix":
        at_once = [call._replace(arrival=0.0, after=None) for call in agents(1e9, count, seed)]
        calls = agents(LOAD * rate_of(at_once), count, seed)
        return of_programs(calls, run(Sarathi(), calls)) / of_programs(calls, run(Plas(), calls))
    calls = load("orca", LOAD * rate_of(load("orca", 1e9, count, seed)), count, seed)
    policy = Srpt(noise=0.5 if name == "srpt_noisy" else 0.0)
    return latency(run(Sarathi(), calls)) / latency(
        run(policy, calls, predicts=name == "srpt_quantiles")
    )


def mixed(rate: float, count: int, seed: int) -> list[Call]:
    """Requests of which a fifth has long prompts and the others short ones."""
    dice = random.Random(f"mixed-{seed}")
    at = 0.0
    calls = list[Call]()
    for _ in range(count):
        at += dice.expovariate(1.0) / rate
        bounds = LONG if dice.random() < SHARE_OF_LONG else SHORT
        calls.append(Call(at, dice.randint(*bounds), dice.randint(16, 64)))
    return calls


def ttft_of_short(calls: Sequence[Call], outcome: Outcome) -> float:
    """The mean time to the first token of the requests with short prompts."""
    pairs = zip(calls, outcome.services, strict=True)
    return statistics.fmean(
        [
            service.tokens[0] - service.arrival
            for call, service in pairs
            if call.num_prompt <= SHORT[1]
        ]
    )


def claim(name: str, count: int, seed: int) -> float:
    """Our ratio of a claim, on the requests of one seed."""
    if name == "sagesched":
        calls = tailed(LOAD * rate_of(tailed(1e9, count, seed)), count, seed)
        others = [
            latency(run(Sarathi(), calls)),
            latency(run(SkipJoinMlfq(), calls)),
            latency(run(Srpt(), calls, predicts=True)),
        ]
        return min(others) / latency(run(SageSched(), calls))
    at_once = mixed(1e9, count, seed)
    top = rate_of(at_once)
    if name == "ewsjf.rate":
        ends = [service.end for service in run(Ewsjf(), at_once).services]
        return count / max(ends) / top
    ratios = []
    for level in LOADS:
        calls = mixed(level * top, count, seed)
        before = ttft_of_short(calls, run(Sarathi(), calls))
        ratios.append(before / ttft_of_short(calls, run(Ewsjf(), calls)))
    return max(ratios)


def claims(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """The claims, the mean of three seeds: each holds, or does not."""
    runs = [(name, effort.requests // 2, seed) for name, seed in product(CLAIMS, range(3))]
    values = iter(effort.map(claim, *zip(*runs, strict=True)))
    found = {name: list(islice(values, 3)) for name in CLAIMS}
    rows = []
    for name, (least, text) in CLAIMS.items():
        mean = statistics.fmean(found[name])
        rows.append(
            Row(
                f"ratios.{name}",
                f"{text}, mean of 3 seeds",
                mean,
                f">= {least}",
                holds=mean >= least,
            )
        )
    return found, rows


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """The ratios, the mean of three seeds, and the claims."""
    runs = [(name, effort.requests // 2, seed) for name, seed in product(PAPERS, range(3))]
    values = iter(effort.map(ratio, *zip(*runs, strict=True)))
    found: Mapping[str, list[float]] = {name: list(islice(values, 3)) for name in PAPERS}
    rows = [
        Row(f"ratios.{name}", f"gain over the baseline, mean of 3 seeds: {name}", statistics.fmean(found[name]), paper,
            is_input=True)
        for name, paper in PAPERS.items()
    ]  # fmt: skip
    claimed, judged = claims(effort)
    return {**found, **claimed}, rows + judged
