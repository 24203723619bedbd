"""Builds a running engine from the settings of the user. Every "auto" is resolved here."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from orca_jax.assembly.adapters import adapter_reader, load_first
from orca_jax.assembly.budget import token_budget
from orca_jax.assembly.built import Built, join_parts, refused_updates, summary_of, timeline_header
from orca_jax.assembly.described import Described, describe
from orca_jax.assembly.devices import ONE_HOST, Host
from orca_jax.assembly.products import product_library
from orca_jax.assembly.resolve import cache_directory, dtype_of, explain, resolve
from orca_jax.assembly.scheduler import build_scheduler, build_scheduling
from orca_jax.assembly.self_test import try_kernels
from orca_jax.assembly.settings import is_toy, num_workers
from orca_jax.assembly.speculation import speculating
from orca_jax.assembly.support import Facts, check_settings, check_support
from orca_jax.assembly.toy import build_toy
from orca_jax.cluster.messages import ModelJob
from orca_jax.config import AttentionName, EngineConfig
from orca_jax.exec.host import trim_heap
from orca_jax.progress import line_without_bars
from orca_jax.startup import StartTimes
from orca_jax.timeline.writer import check_trace_file

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    on_compile: Callable[[], None] | None = None,
    times: StartTimes | None = None,
    announce: Callable[[str], None] = line_without_bars,
    host: Host = ONE_HOST,
) -> Built:
    """Resolve every "auto", build an engine, and log a line about it.

    Args:
        config: the settings of the user.
        on_compile: called between loading and compiling.
        times: takes the phases of the start; None measures them from this call on.
        announce: called with a line of text before loading, if `config.progress` is set.
        host: the processes, which load a part of the model each; this process alone by default.

    Raises:
        ClusterLostError: another process was lost.
        ConfigError: a setting, a model directory or a checkpoint is wrong; `param` names the setting.
    """
    times = times or StartTimes()
    check_settings(config)
    if config.trace_file is not None:
        check_trace_file(config.trace_file)
    check_support(Facts(config, host.num_hosts), "hosts")
    _warn_of_workers(num_workers(config), config.pipeline_parallel_size)
    if is_toy(config.model):
        built = build_toy(config, times, host)
    else:
        found = describe(config)
        host.gather()
        if config.progress:
            announce(f"loading and compiling {config.model}")
        built = _build(found, host, times, on_compile)
    trim_heap()
    logger.info("%s", built.summary.line(config.model))
    return built


def _build(found: Described, host: Host, times: StartTimes, on_compile: Callable[[], None] | None) -> Built:
    """Place the model on its devices, load it, and compile its programs."""
    with times.phase("import"):
        from orca_jax.assembly.executor import place_model, start_executor
        from orca_jax.assembly.weights import WeightUpdater

    config, model, max_model_len = found.config, found.model, found.max_model_len
    directory = cache_directory(config.compile_cache)
    outcome = try_kernels(config, model, directory)
    if outcome.implementation is not None:
        config = replace(config, attention_implementation=cast(AttentionName, outcome.implementation))
    devices = host.devices(config, model)
    platform = devices[0].platform
    dtype = dtype_of(config, platform)
    check_support(Facts(config, host.num_hosts, model, platform, dtype), "platform")
    placed = place_model(
        found.source,
        model,
        dtype=dtype,
        load_format=config.load_format,
        seed=config.seed,
        devices=devices,
        num_stages=config.pipeline_parallel_size,
        library=product_library(config, model, dtype, platform, directory) if host.num_hosts == 1 else None,
    )
    # Before the large model, whose KV cache takes the memory that is left.
    proposer = None if found.draft is None else found.draft.start(devices, times, directory)
    resolved = resolve(config, placed.config, max_model_len, placed, host.free, directory)
    # These may raise errors, so they come before the weights are read and minutes of compilation.
    _, pool = build_scheduling(config, model, max_model_len, resolved.cache, resolved.buckets[-1])
    attention = explain(placed.config, resolved, placed.mesh)
    host.share(ModelJob(model, resolved, config.load_format, config.seed, config.revision))
    local = start_executor(placed, resolved, times, on_compile, host.meet, has_bars=config.progress)
    executor = host.lead(local)
    budget = token_budget(config, platform, local.launch_seconds)
    plain = build_scheduler(config, resolved.cache, budget)
    scheduler = speculating(config, plain, budget, local.launch_seconds, proposer)
    header = timeline_header(config, resolved.cache, max_model_len, budget, resolved.buckets)
    engine = join_parts(executor, scheduler, pool, header, local.adapters)
    refused = refused_updates(Facts(config, host.num_hosts, placed.config))
    return Built(
        engine=engine,
        tokenizer=found.tokenizer,
        grammars=found.grammars,
        model_config=model,
        max_model_len=max_model_len,
        timeline_header=header,
        read_adapter=load_first(engine, config, adapter_reader(placed.config, resolved)),
        summary=summary_of(header, pool.kv, times.report(), resolved, attention, placed),
        executor_config=resolved,
        prepare_update=refused or WeightUpdater(placed, local, found.source).prepare,
        directory=found.texts,
        proposer=proposer,
        self_tests=outcome.tests,
    )


def _warn_of_workers(workers: int, num_stages: int) -> None:
    """Warn if the number of batches in flight does not suit the number of stages."""
    if workers > 1 and num_stages == 1:
        logger.warning(
            "n_workers is %d, but the model has one pipeline stage: the batches take turns on it, so only the time of "
            "the host is hidden, and each token waits for %d iterations; 1 is faster if the device is busy",
            workers,
            workers,
        )
    if workers < num_stages:
        logger.warning(
            "n_workers is %d, but the pipeline has %d stages: at least %d of them have no work at any time; leave "
            "n_workers out",
            workers,
            num_stages,
            num_stages - workers,
        )
