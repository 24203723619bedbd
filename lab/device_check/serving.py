"""Measures the engine on the paper's trace."""

import time
from dataclasses import replace
from functools import partial

from lab.device_check.part import Found, Setting, Skip, Write, attempt
from lab.device_check.steps import Model
from lab.device_check.trace import throughput, trace_of
from lab.paper.systems import parse_system
from lab.real.figures import figure_10
from lab.real.laboratory import Laboratory
from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.scheduler import build_scheduling
from orca_jax.engine import Engine
from orca_jax.exec.executor import JaxExecutor
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams

MODELS = ("preset:llama-3-8b", "preset:gpt2-xl")
MAX_MODEL_LEN = 640  # of the trace's longest request
CURVES_MINUTES = 1.2
DRY_SCALE = 0.03  # of the lengths in a dry run


def serve(what: str, setting: Setting, write: Write) -> None:
    """Run the trace greedily on the model of `setting`, or else on the first of `MODELS` that fits."""
    for source in [setting.model] if setting.model else MODELS:
        about = {"trace": what, "system": "orca-jax", "model": source.removeprefix("preset:")}
        try:
            engine, trace = build(Model(setting, source), write)
        except Skip as reason:
            write(**about, skipped=str(reason))
            continue
        run(engine, [replace(request, num_output=2) for request in trace[:4]])
        attempt(write, partial(measure, engine, trace), **about)
        return


def curves(what: str, setting: Setting, write: Write) -> None:
    """Measure the paper's Figure 10 in short, as `python -m lab paper_real fig10` does."""
    for source in [setting.model] if setting.model else MODELS:
        about = {"figure": what, "model": source.removeprefix("preset:")}
        model = Model(setting, source)
        try:
            engine, _ = build(model, write)
        except Skip as reason:
            write(**about, skipped=str(reason))
            continue
        attempt(
            write,
            partial(draw_curves, laboratory_of(engine, model), setting.dry_run, write),
            **about,
        )
        return


def laboratory_of(engine: Engine, model: Model) -> Laboratory:
    """The engine with exchangeable schedulers."""
    executor = engine.executor
    assert isinstance(executor, JaxExecutor), "as built"
    cache = executor.config.cache
    budget = executor.config.buckets[-1]

    def reschedule(settings: EngineConfig) -> None:
        engine.reschedule(
            *build_scheduling(choices_of(settings), model.config, MAX_MODEL_LEN, cache, budget)
        )

    shared = EngineConfig(enable_prefix_caching=False)
    scale = DRY_SCALE if model.setting.dry_run else 1.0
    return Laboratory(engine, shared, model.config, MAX_MODEL_LEN, scale, reschedule)


def draw_curves(laboratory: Laboratory, dry_run: bool, write: Write) -> Found:
    """Write the points of the curves; returns the headline."""
    names = (
        ("ft(1,1)", "orca(4)")
        if dry_run
        else ("ft(1,1)", "ft(8,8)", "orca(8)", "orca(32)", "chunked(32)")
    )
    laboratory.warm_up([parse_system(name) for name in names])
    found = figure_10(laboratory, names, 0, 0.02 if dry_run else CURVES_MINUTES)
    for row in found["runs"]["paper"]:
        keys = (
            "load",
            "rate",
            "requests_per_s",
            "median_normalized_latency_ms",
            "p99_ttft_ms",
            "requests",
            "seconds",
        )
        write(run=row["system"], **{key: row.get(key) for key in keys})
    points = found["headline_points"].items()
    headline = {
        f"requests_per_s of {name}": point.throughput if point else 0.0 for name, point in points
    }
    return {
        "latency_ms": found["headline_latency_ms"],
        **headline,
        "ratio": found["headline_ratio"],
    }


def build(model: Model, write: Write) -> tuple[Engine, list[WorkloadRequest]]:
    """An engine as built by default, with fewer buckets and samplers, and the trace in its model's ids.

    Raises:
        Skip: the model does not fit.
    """
    dry_run = model.setting.dry_run
    config = model.config
    rows, buckets = (8, (8, 128)) if dry_run else (128, (32, 128, 512, 2048))
    decoder = model.load()
    each = -(-MAX_MODEL_LEN // model.page_size)
    num_pages = min((rows + 1) * each, model.pages_that_fit(buckets[-1], rows, MAX_MODEL_LEN))
    if num_pages < rows + each:
        raise Skip(
            f"beside the weights there is room for {num_pages} pages of {model.page_size} tokens"
        )
    start = time.perf_counter()

    def on_phase(phase: str) -> None:
        write(phase=phase, at_s=time.perf_counter() - start)

    executor = model.executor(decoder, buckets, rows, MAX_MODEL_LEN, num_pages, on_phase)
    settings = EngineConfig(max_num_seqs=rows, scheduler="chunked", enable_prefix_caching=False)
    cache = executor.config.cache
    scheduler, pool = build_scheduling(
        choices_of(settings), config, MAX_MODEL_LEN, cache, buckets[-1]
    )
    return Engine(executor, scheduler, pool, seed=0), trace_of(config.vocab_size, dry_run)


def measure(engine: Engine, trace: list[WorkloadRequest]) -> Found:
    """Measure tokens per second, idle time and preemptions; a compilation meanwhile is an error."""
    executor = engine.executor
    assert isinstance(executor, JaxExecutor), "as built"
    idle = executor.stats.idle_seconds
    found = throughput(trace, partial(run, engine))
    found["idle_share_at_most"] = (executor.stats.idle_seconds - idle) / found["seconds"]
    found["preemptions"] = engine.stats.preemptions
    late = executor.stats.compiles_while_serving
    return {**found, "error": f"{late} programs were compiled while serving"} if late else found


def run(engine: Engine, trace: list[WorkloadRequest]) -> int:
    """Run the trace to its end; returns the number of generated tokens."""
    for index, request in enumerate(trace):
        params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
        engine.add_request(f"r{index}", request.prompt_ids, params)
    generated = 0
    while engine.has_work:
        generated += sum(len(update.new_ids) for update in engine.step())
    return generated
