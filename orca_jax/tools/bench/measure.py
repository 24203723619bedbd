"""Runs a workload on an engine in real time, and summarizes the result."""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from orca_jax.assembly.built import Built
from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.scheduler import build_scheduling, seconds_of, speculating
from orca_jax.assembly.support import check_settings
from orca_jax.assembly.toy import TOY_BUDGET
from orca_jax.engine import Engine, totals
from orca_jax.helpers.reporting import percentile
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.tools.bench.feed import Drive
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.config import CacheConfig, EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import RequestMetrics, SamplingParams


@dataclass(frozen=True)
class PassResult:
    """One pass over a workload; times are in seconds."""

    wall: float
    workload: Sequence[WorkloadRequest]
    metrics: Sequence[RequestMetrics]  # in the order of the workload
    token_times: Sequence[Sequence[float]]  # for each request, the delivery time of each token
    # counters of engine and executor, for this pass alone, and the token budget
    figures: Mapping[str, float]

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies of all requests: seconds between the deliveries of two tokens."""
        found = []
        for times in self.token_times:
            found += [later - earlier for earlier, later in pairwise(times)]
        return found


def run_workload(
    engine: Engine, workload: Sequence[WorkloadRequest], *, temperature: float = 0.0
) -> PassResult:
    """Run all requests to their ends, each from its arrival on."""
    before = totals(engine.stats, engine.executor.stats)
    finished: dict[str, RequestMetrics] = {}
    times: dict[str, list[float]] = {}
    start = time.monotonic()
    names = [f"{start}-{index}" for index in range(len(workload))]

    def add(index: int, due: float) -> None:
        request = workload[index]
        params = SamplingParams(
            max_tokens=request.num_output, temperature=temperature, seed=index, ignore_eos=True
        )
        engine.add_request(names[index], request.prompt_ids, params)

    arrivals = [start + request.arrival for request in workload]
    for updates in Drive.in_real_time(engine).serve(arrivals, add):
        now = time.monotonic()
        for update in updates:
            times.setdefault(update.request_id, []).extend([now] * len(update.new_ids))
            if update.finish_reason is not None:
                assert update.metrics is not None and update.error is None, update
                finished[update.request_id] = update.metrics
    wall = time.monotonic() - start
    after = totals(engine.stats, engine.executor.stats)
    figures = {name: after[name] - before.get(name, 0) for name in after}
    if isinstance(engine.scheduler, ChunkedScheduler):
        figures["token_budget"] = engine.scheduler.token_budget
    return PassResult(
        wall, workload, [finished[name] for name in names], [times[name] for name in names], figures
    )


def warm_up(engine: Engine, workload: Sequence[WorkloadRequest]) -> None:
    """Run a few short requests before the measurement, so that first-use costs are paid.

    None is longer than in the workload, which may fill the model's context. Freeze the loaded objects for the garbage
    collector, as the engine process of a server does.
    """
    short = [
        WorkloadRequest(0.0, request.prompt_ids[:64], min(4, request.num_output))
        for request in workload[:4]
    ]
    run_workload(engine, short)
    gc.collect()
    gc.freeze()


def mean_figures(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over several passes."""
    means = {}
    for name in passes[0]:
        means[name] = statistics.mean([figures[name] for figures in passes])
    return means


def summarize(run: PassResult) -> dict[str, float]:
    """Compute the figures common to all benchmarks."""
    outputs = [request.num_output for request in run.workload]
    inputs = [len(request.prompt_ids) for request in run.workload]
    normalized = [
        (metrics.finished - metrics.arrival) / count
        for metrics, count in zip(run.metrics, outputs, strict=True)
    ]
    gaps = run.gaps or [0.0]  # if every request has a single token
    first = [metrics.first_token - metrics.arrival for metrics in run.metrics]
    figures = run.figures
    iterations = max(run.figures["iterations"], 1)
    host = figures["schedule_seconds"] + figures["update_seconds"] + figures["pack_seconds"]
    return {
        "output_tokens_per_s": sum(outputs) / run.wall,
        "total_tokens_per_s": (sum(outputs) + sum(inputs)) / run.wall,
        "requests_per_s": len(run.workload) / run.wall,
        "median_normalized_latency_ms": 1e3 * statistics.median(normalized),
        "p99_normalized_latency_ms": 1e3 * percentile(normalized, 99),
        "median_ttft_ms": 1e3 * statistics.median(first),
        "p99_ttft_ms": 1e3 * percentile(first, 99),
        "median_itl_ms": 1e3 * statistics.median(gaps),
        "p99_itl_ms": 1e3 * percentile(gaps, 99),
        "iterations": figures["iterations"],
        **({"token_budget": figures["token_budget"]} if "token_budget" in figures else {}),
        "mean_batch_size": figures["scheduled_requests"] / iterations,
        "padding_fraction": figures["padding_tokens"]
        / max(figures["padding_tokens"] + figures["tokens"], 1),
        "compiles_while_serving": figures["compiles_while_serving"],
        "host_ms_per_iteration": 1e3 * host / iterations,
        "dispatch_ms_per_iteration": 1e3 * figures["dispatch_seconds"] / iterations,
        "device_idle_ms_per_iteration": 1e3 * figures["idle_seconds"] / iterations,
        "device_idle_share": figures["idle_seconds"] / run.wall,
        "wall_s": run.wall,
    }


def reschedule(built: Built, config: EngineConfig) -> None:
    """Give an idle engine another scheduler and an empty pool.

    Args:
        built: an engine with equal settings, except for those of scheduling, and at least as large a launch.
        config: the new settings; `max_num_batched_tokens` is the budget of `chunked`.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    cache, largest, default, launches = _shapes(built, config)
    budget = config.max_num_batched_tokens or default
    if budget > largest:
        message = f"max_num_batched_tokens {budget} is more than the largest launch, {largest}"
        raise ConfigError(message, param="max_num_batched_tokens")
    choices = check_settings(config)
    plain, pool = build_scheduling(
        choices, built.model_config, built.max_model_len, cache, budget, None, seconds_of(launches)
    )
    scheduler = speculating(choices.drafts, plain, budget, launches, built.proposer)
    built.engine.reschedule(scheduler, pool, config.check_in_interval)


def _shapes(
    built: Built, config: EngineConfig
) -> tuple[CacheConfig, int, int, Mapping[int, float]]:
    """Return the cache, the tokens of the largest launch, their default under `config`, and seconds of launches."""
    if built.executor_config is None:
        kv = built.engine.pool.kv
        return (
            CacheConfig(kv.groups, kv.num_blocks, kv.page_size, "float32"),
            TOY_BUDGET,
            TOY_BUDGET,
            {},
        )
    import jax

    from orca_jax.exec.executor import JaxExecutor

    executor = built.engine.executor
    assert isinstance(executor, JaxExecutor)
    default = choices_of(config).budget.tokens(jax.default_backend(), executor.launch_seconds)
    return executor.config.cache, executor.config.buckets[-1], default, executor.launch_seconds
