"""Builds a running engine from the settings of the user. Every "auto" is resolved here."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from orca_jax.assembly.adapters import AdapterReader, adapter_reader, load_first, toy_adapter_reader
from orca_jax.assembly.budget import token_budget
from orca_jax.assembly.devices import check_platform, claim_devices
from orca_jax.assembly.draft_model import describe_draft, start_draft
from orca_jax.assembly.products import product_library
from orca_jax.assembly.resolve import (
    PAGE_SIZE,
    cache_directory,
    dtype_of,
    explain,
    max_model_len_of,
    resolve,
    tokenizer_of,
)
from orca_jax.assembly.scheduler import build_scheduler, build_scheduling, num_rows
from orca_jax.assembly.self_test import SelfTest, has_accelerator_support, try_implementations
from orca_jax.assembly.settings import (
    TOY,
    check_settings,
    check_toy,
    is_toy,
    num_workers,
    quantised,
)
from orca_jax.assembly.speculation import speculating
from orca_jax.assembly.summary import summary_of
from orca_jax.assembly.toy import toy_executor
from orca_jax.assembly.updates import PrepareUpdate, refuse_cluster, refuse_quantised, refuse_toy
from orca_jax.bundled import directory_of, pinned, texts_of
from orca_jax.cache_spec import one_group
from orca_jax.cluster.messages import ModelJob, ToyJob
from orca_jax.config import AttentionName, CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, page_dtype
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.exec.host import trim_heap
from orca_jax.model.describe import read_model_config
from orca_jax.model.weight_files import check_weights
from orca_jax.progress import line_without_bars
from orca_jax.sched.drafts.model import ModelProposer
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.scheduler import Scheduler
from orca_jax.sim.clock import Clock, clock_latency
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.startup import EngineSummary, StartReport, StartTimes
from orca_jax.step import Executor
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.timeline.writer import TIMELINE_VERSION, TimelineFile, TimelineHeader, TimelineWriter, check_trace_file

if TYPE_CHECKING:
    from orca_jax.assembly.cluster import LeaderBuild

logger = logging.getLogger(__name__)

TOY_LATENCY = 0.001  # seconds per iteration of the toy, so that a busy one leaves processor time to other processes
TOY_PAGE_SIZE = 16
TOY_BUDGET = 2048


@dataclass(frozen=True)
class Built:
    """An engine with what its front ends need. A context manager, which closes the engine at its end."""

    engine: Engine
    tokenizer: Tokenizer
    grammars: GrammarFactory  # compiles `SamplingParams.structured` to a constraint for `Engine.add`
    model_config: ModelConfig
    max_model_len: int  # of one request, prompt and generated tokens together
    timeline_header: TimelineHeader  # the first line of a timeline of this engine
    summary: EngineSummary  # resolved settings, and the start
    executor_config: ExecutorConfig | None = None  # None for the toy
    prepare_update: PrepareUpdate = refuse_toy  # see `assembly.weights`
    directory: str = ""  # of the chat template and the sampling defaults; empty for a preset
    read_adapter: AdapterReader | None = None  # None: the engine has no adapters
    proposer: ModelProposer | None = None  # with a draft model
    self_tests: tuple[SelfTest, ...] = ()  # of attention kernels, in order; the implementation after the failed is used

    @property
    def start(self) -> StartReport:
        """Times and programs of the start."""
        return self.summary.start

    def close(self) -> None:
        """Free the device's memory. The engine cannot run afterwards."""
        self.engine.executor.close()
        if self.proposer is not None:
            self.proposer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def build_engine(
    config: EngineConfig,
    on_compile: Callable[[], None] | None = None,
    times: StartTimes | None = None,
    announce: Callable[[str], None] = line_without_bars,
    cluster: "LeaderBuild | None" = None,
) -> Built:
    """Resolve every "auto", build an engine, and log a line about it.

    Args:
        config: the settings of the user.
        on_compile: called between loading and compiling.
        times: takes the phases of the start; None measures them from this call on.
        announce: called with a line of text before loading, if `config.progress` is set.
        cluster: the other processes, which load a part of the model each; None for this process alone.

    Raises:
        ClusterLostError: another process was lost.
        ConfigError: a setting, a model directory or a checkpoint is wrong; `param` names the setting.
    """
    built = _build(config, on_compile, times or StartTimes(), announce, cluster)
    trim_heap()
    logger.info("%s", built.summary.line(config.model))
    return built


def _build(
    config: EngineConfig,
    on_compile: Callable[[], None] | None,
    times: StartTimes,
    announce: Callable[[str], None],
    cluster: "LeaderBuild | None",
) -> Built:
    _check(config, cluster is not None)
    if is_toy(config.model):
        return _build_toy(config, times, cluster)
    config = pinned(config)
    source, texts = directory_of(config) or config.model, texts_of(config)
    model = quantised(config, read_model_config(source, config.decoder))
    tokenizer = tokenizer_of(config, source)
    max_model_len = max_model_len_of(config, model)
    check_weights(source, config.load_format)
    draft = describe_draft(config, model, tokenizer, max_model_len)
    if cluster is not None:
        cluster.gather()
    if config.progress:
        announce(f"loading and compiling {config.model}")
    with times.phase("import"):
        from orca_jax.assembly.executor import place_model, start_executor
        from orca_jax.assembly.weights import WeightUpdater

    directory = cache_directory(config.compile_cache)
    config, self_tests = _test_kernels(config, model, directory)
    devices = claim_devices(config, model) if cluster is None else cluster.devices(config, model)
    platform = devices[0].platform
    check_platform(config, platform)
    dtype, stages = dtype_of(config, platform), config.pipeline_parallel_size
    loading: dict[str, Any] = {"load_format": config.load_format, "seed": config.seed}
    if cluster is None:
        loading["library"] = product_library(config, model, dtype, platform, directory)
    placed = place_model(source, model, dtype=dtype, devices=devices, num_stages=stages, **loading)
    # Before the large model, whose KV cache takes the memory that is left.
    proposer = None if draft is None else start_draft(draft, devices, times, directory)
    free, meet = (None, None) if cluster is None else (cluster.free, cluster.meet)
    resolved = resolve(config, placed.config, max_model_len, placed, free, directory)
    # These may raise errors, so they come before the weights are read and minutes of compilation.
    _, pool = build_scheduling(config, model, max_model_len, resolved.cache, resolved.buckets[-1])
    attention = explain(placed.config, resolved, placed.mesh)
    if cluster is not None:
        cluster.share(ModelJob(model, resolved, config.load_format, config.seed, config.revision))
    local = start_executor(placed, resolved, times, on_compile, meet, has_bars=config.progress)
    executor: Executor = local if cluster is None else cluster.lead(local)
    budget = token_budget(config, platform, local.launch_seconds)
    plain = build_scheduler(config, resolved.cache, budget)
    scheduler = speculating(config, plain, budget, local.launch_seconds, proposer)
    header = _timeline_header(config, resolved.cache, max_model_len, budget, resolved.buckets)
    engine = _engine(config, executor, scheduler, pool, header, local.adapters)
    reader = load_first(engine, config, adapter_reader(placed.config, resolved))
    summary = summary_of(header, pool.kv, times.report(), resolved, attention, placed)
    built = _built(engine, tokenizer, model, header, summary, resolved)
    built = replace(built, directory=texts, self_tests=self_tests, proposer=proposer, read_adapter=reader)
    if cluster is not None:
        return replace(built, prepare_update=refuse_cluster)
    if placed.config.quantization is not None:
        return replace(built, prepare_update=refuse_quantised)
    return replace(built, prepare_update=WeightUpdater(placed, local, source).prepare)


def _check(config: EngineConfig, has_hosts: bool) -> None:
    """Refuse wrong settings, and those for one host on several ones; warn of slow ones. Raises ConfigError."""
    check_settings(config)
    if config.trace_file is not None:
        check_trace_file(config.trace_file)
    _warn_of_workers(config)
    if not has_hosts:
        return
    if config.enable_lora:
        raise ConfigError("enable_lora needs nnodes 1: adapters are loaded by one process", param="enable_lora")
    if config.cpu_products == "native":
        raise ConfigError("cpu_products native needs nnodes 1: hosts may differ; leave it out", param="cpu_products")
    if config.decoder is not None:
        raise ConfigError("decoder needs nnodes 1: a decoder of your own runs on one host", param="decoder")
    if config.speculative_config is not None and config.speculative_config.model is not None:
        message = (
            "speculative_config: method draft_model needs nnodes 1: the other hosts have no draft model; give ngram"
        )
        raise ConfigError(message, param="speculative_config")


def _warn_of_workers(config: EngineConfig) -> None:
    """Warn if the number of batches in flight does not suit the number of stages."""
    workers, num_stages = num_workers(config), config.pipeline_parallel_size
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


def _test_kernels(
    config: EngineConfig, model: ModelConfig, directory: str | None
) -> tuple[EngineConfig, tuple[SelfTest, ...]]:
    """Try the kernels of an accelerator. Returns the settings, with another implementation if the kernels failed."""
    import jax

    if not config.kernel_self_test or not has_accelerator_support(jax.config.jax_platforms):
        return config, ()
    from orca_jax.exec.memory import has_jax_started
    from orca_jax.kernels.ragged_attention.self_test import Trial
    from orca_jax.model.sharding import check_divisible, on_shards

    if has_jax_started():
        logger.info(
            "the attention kernels are not tested: JAX has started, and may keep the device from other processes"
        )
        return config, ()
    dtype = dtype_of(config, "gpu")
    chips = config.tensor_parallel_size or 1
    check_divisible(model, chips)
    held = on_shards(model, chips)
    trial = Trial(
        num_heads=held.num_heads // chips,
        num_kv_heads=held.num_kv_heads // chips,
        head_dim=held.head_dim,
        page_size=config.page_size or PAGE_SIZE,
        dtype=dtype,
        page_dtype=dtype if config.kv_cache_dtype == "auto" else page_dtype(config.kv_cache_dtype),
        implementation=config.attention_implementation,
    )
    outcome = try_implementations(trial, directory)
    if outcome.implementation is not None:
        config = replace(config, attention_implementation=cast(AttentionName, outcome.implementation))
    return config, outcome.tests


def _built(
    engine: Engine,
    tokenizer: Tokenizer,
    model: ModelConfig,
    header: TimelineHeader,
    summary: EngineSummary,
    resolved: ExecutorConfig | None = None,
) -> Built:
    grammars = GrammarFactory(tokenizer, model.vocab_size, model.eos_token_ids)
    return Built(engine, tokenizer, grammars, model, header.max_model_len, header, summary, resolved)


def _timeline_header(
    config: EngineConfig, cache: CacheConfig, max_model_len: int, budget: int, buckets: tuple[int, ...] = ()
) -> TimelineHeader:
    offset = time.time() - time.monotonic()
    return TimelineHeader(TIMELINE_VERSION, config, cache, max_model_len, budget, buckets, offset)


def _engine(
    config: EngineConfig,
    executor: Executor,
    scheduler: Scheduler,
    pool: RequestPool,
    header: TimelineHeader,
    adapters: dict[str, Any],
) -> Engine:
    return Engine(
        executor,
        scheduler,
        pool,
        seed=config.seed,
        observer=_observer(header),
        weights=adapters,
        check_in_interval=config.check_in_interval,
    )


def _observer(header: TimelineHeader) -> TimelineWriter | None:
    path = header.config.trace_file
    return None if path is None else TimelineWriter(header, msgspec.json.Encoder().encode_lines, TimelineFile(path))


def _build_toy(config: EngineConfig, times: StartTimes, cluster: "LeaderBuild | None") -> Built:
    """Build an engine with the toy model or its clock, for tests and load tests: it starts at once and needs no JAX."""
    check_toy(config)
    override = None if config.model == TOY else Clock(clock_latency(config.model))
    latency = TOY_LATENCY if config.model == TOY else clock_latency(config.model)
    max_model_len = max_model_len_of(config, TOY_MODEL)
    page_size = config.page_size or TOY_PAGE_SIZE
    rows = num_rows(config)
    num_pages = config.num_pages or -(-rows * (max_model_len + page_size - 1) // page_size)
    cache = CacheConfig(one_group(TOY_MODEL.layer_caches), (num_pages,), page_size, "float32")
    budget = config.max_num_batched_tokens or max(TOY_BUDGET, 2 * config.max_num_seqs)
    plain, pool = build_scheduling(config, TOY_MODEL, max_model_len, cache, budget)
    scheduler = speculating(config, plain, budget, {})
    job = ToyJob(TOY_MODEL.vocab_size, num_pages, page_size, rows, latency, config.pipeline_parallel_size)
    toy = toy_executor(job, override)
    executor: Executor = toy
    if cluster is not None:
        cluster.gather()
        cluster.share(job)
        cluster.meet()
        executor = cluster.lead(executor)
    header = _timeline_header(config, cache, max_model_len, budget)
    engine = _engine(config, executor, scheduler, pool, header, toy.adapters)
    reader = load_first(engine, config, toy_adapter_reader(config))
    tokenizer = tokenizer_of(config, config.model)
    built = _built(engine, tokenizer, TOY_MODEL, header, summary_of(header, pool.kv, times.report()))
    return replace(built, read_adapter=reader)
