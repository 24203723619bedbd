"""Figures of one pass under the names of `vllm bench serve`, computed as it computes them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from orca_jax.tools.bench.online.answers import CallOutcome
from orca_jax.tools.bench.workload.generate import WorkloadRequest

type Figure = float | int | Mapping[str, int] | Mapping[str, str] | None

PERCENTILES = (90, 99)
LATE_MS = 50.0  # p99 of the lateness of requests, from which on the client is called slow
BUSY_SHARE = 0.8  # of a core; the client has one thread


def tpot(outcome: CallOutcome) -> float:
    """Return the seconds per output token after the first one; 0 for a single token, as in vLLM's goodput."""
    count = outcome.output_tokens
    if count < 2:
        return 0.0
    return (outcome.end - outcome.token_times[0]) / (count - 1)


def figures(
    planned: Sequence[WorkloadRequest], outcomes: Sequence[CallOutcome], limits: Mapping[str, float]
) -> dict[str, Figure]:
    """Compute the figures of the measured requests. Latencies are null without a completed request.

    Throughputs are over the time from the first call to the last end, failed calls included.

    Args:
        planned: the requests.
        outcomes: their outcomes, in the same order.
        limits: those of goodput, in milliseconds, by "ttft", "tpot" and "e2el".
    """
    pairs = [
        (plan, outcome)
        for plan, outcome in zip(planned, outcomes, strict=True)
        if not outcome.failure
    ]
    done = [outcome for _, outcome in pairs]
    seconds = max(outcome.end for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    inputs = sum(len(p.prompt_ids) if o.num_input is None else o.num_input for p, o in pairs)
    outputs = sum(outcome.output_tokens for outcome in done)
    failures = [outcome for outcome in outcomes if outcome.failure]
    gaps: list[float] = []
    for outcome in done:
        gaps += [later - earlier for earlier, later in pairwise(outcome.token_times)]
    latencies = {
        "ttft": [outcome.token_times[0] - outcome.sent for outcome in done],
        "tpot": [tpot(outcome) for outcome in done if outcome.output_tokens > 1],
        "itl": gaps,
        "e2el": [outcome.end - outcome.sent for outcome in done],
        "normalized_latency": [
            (outcome.end - outcome.sent) / outcome.output_tokens for outcome in done
        ],
    }
    result: dict[str, Figure] = {
        "duration": seconds,
        "completed": len(done),
        "failed": len(failures),
        "errors": dict(Counter(outcome.failure for outcome in failures)),
        "error_examples": {outcome.failure: outcome.detail for outcome in reversed(failures)},
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(is_good(outcome, limits) for outcome in done) / seconds
        if limits
        else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_concurrent_requests": most_at_once(outcomes),
        "other_output_lengths": sum(
            plan.num_output != outcome.output_tokens for plan, outcome in pairs
        ),
        "uncounted_by_server": sum(outcome.num_output is None for outcome in done),
    }
    for name, values in latencies.items():
        result |= statistics_ms(name, values)
    return result


def is_good(outcome: CallOutcome, limits: Mapping[str, float]) -> bool:
    """True if a completed request is within all limits."""
    measured = {
        "ttft": outcome.token_times[0] - outcome.sent,
        "tpot": tpot(outcome),
        "e2el": outcome.end - outcome.sent,
    }
    return all(1e3 * measured[name] <= limit for name, limit in limits.items())


def statistics_ms(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles in milliseconds, under vLLM's names."""
    import numpy as np  # help comes without it

    values = 1e3 * np.asarray(seconds, np.float64)
    if not values.size:
        names = ["mean", "median", "std", *[f"p{percent}" for percent in PERCENTILES]]
        return {f"{key}_{name}_ms": None for key in names}
    result = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    result |= {f"p{percent}": np.percentile(values, percent) for percent in PERCENTILES}
    return {f"{key}_{name}_ms": float(value) for key, value in result.items()}


def steady_figures(outcomes: Sequence[CallOutcome], warmup: int) -> dict[str, float | None]:
    """Return the throughputs while requests still arrive: from the first measured call to the last one's begin.

    All calls have a part in them. They are null if all requests leave at once.
    """
    start = outcomes[warmup].sent
    end = max(outcome.sent for outcome in outcomes)
    done = [outcome for outcome in outcomes if not outcome.failure]
    requests = sum(start < outcome.end <= end for outcome in done)
    tokens = 0.0
    for outcome in done:
        within = sum([start < at <= end for at in outcome.token_times])
        tokens += outcome.output_tokens * within / len(outcome.token_times)
    seconds = end - start
    is_known = seconds > 0 and requests > 0
    return {
        "steady_request_throughput": requests / seconds if is_known else None,
        "steady_output_throughput": tokens / seconds if is_known else None,
    }


def most_at_once(outcomes: Sequence[CallOutcome]) -> int:
    """Return the largest number of calls open at the same time."""
    changes = sorted(
        [(outcome.sent, 1) for outcome in outcomes] + [(outcome.end, -1) for outcome in outcomes]
    )
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most


def client_figures(outcomes: Sequence[CallOutcome], cpu_share: float) -> dict[str, float | None]:
    """Return the overhead of the client: lateness of calls, time to connect, and share of a core."""
    late = statistics_ms("send_lateness", [outcome.sent - outcome.due for outcome in outcomes])
    connects = [
        outcome.connected - outcome.sent for outcome in outcomes if outcome.connected is not None
    ]
    connect = statistics_ms("connect", connects)
    names = (
        "median_send_lateness_ms",
        "p99_send_lateness_ms",
        "median_connect_ms",
        "p99_connect_ms",
    )
    return {**{name: (late | connect)[name] for name in names}, "client_cpu_share": cpu_share}


def warnings(result: Mapping[str, Figure], is_burst: bool, ignores_eos: bool) -> list[str]:
    """Return sentences about figures with a doubt.

    Args:
        result: all figures of a pass.
        is_burst: all requests are due at once, so they cannot all be sent in time.
        ignores_eos: the server accepted `ignore_eos`.
    """
    found = []
    late = result["p99_send_lateness_ms"]
    share = result["client_cpu_share"]
    assert isinstance(late, float) and isinstance(share, float)
    if share > BUSY_SHARE or (late > LATE_MS and not is_burst):
        found.append(
            f"the client or its machine is the bottleneck: calls left {late:.0f} ms late (p99), and the client used "
            f"{share:.0%} of a core; lower the rate, or use a less busy machine"
        )
    if result["failed"]:
        found.append(f"{result['failed']} requests failed: {result['error_examples']}")
    if result["other_output_lengths"]:
        why = (
            "although it accepts ignore_eos"
            if ignores_eos
            else "since it does not accept ignore_eos"
        )
        found.append(
            f"{result['other_output_lengths']} outputs have another length than requested, {why}"
        )
    if result["uncounted_by_server"]:
        found.append(
            f"{result['uncounted_by_server']} answers have no usage; their events count as tokens"
        )
    return found
