"""Builds a running engine from the settings of the user. Every "auto" is resolved here."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import msgspec

from orca_jax.build.budget import launch_sizes, token_budget
from orca_jax.build.devices import check_platform, claim_devices
from orca_jax.build.scheduler import build_scheduler, build_scheduling, num_rows
from orca_jax.build.self_test import SelfTest, has_accelerator_support, try_implementations
from orca_jax.build.settings import TOY, check_settings, check_toy, is_toy
from orca_jax.build.summary import summary_of
from orca_jax.bundled import is_preset, model_directory
from orca_jax.config import (
    GPU_MEMORY_UTILIZATION,
    AttentionName,
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    ModelConfig,
    PageLayout,
)
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.model.describe import read_model_config
from orca_jax.model.weight_files import check_weights
from orca_jax.processor import multiplies_bfloat16
from orca_jax.progress import line_without_bars, progress_bar
from orca_jax.sim.clock import Clock, clock_latency
from orca_jax.sim.toy import TOY_MODEL, ToyExecutor
from orca_jax.startup import EngineSummary, StartReport, StartTimes
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from orca_jax.timeline.writer import TIMELINE_VERSION, TimelineFile, TimelineHeader, TimelineWriter, check_trace_file

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from orca_jax.model.transformer import Decoder

logger = logging.getLogger(__name__)

TOY_LATENCY = 0.001  # seconds per iteration of the toy, so that a busy one leaves processor time to other processes
TOY_PAGE_SIZE = 16
TOY_BUDGET = 2048

_PAGE_SIZE = 128  # tokens; the fastest size measured on a CPU, and large enough to keep page tables short


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
    self_tests: tuple[SelfTest, ...] = ()  # of attention kernels, in order; the implementation after the failed is used

    @property
    def start(self) -> StartReport:
        """Times and programs of the start."""
        return self.summary.start

    def close(self) -> None:
        """Free the device's memory. The engine cannot run afterwards."""
        self.engine.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def build_engine(
    config: EngineConfig,
    on_compile: Callable[[], None] | None = None,
    times: StartTimes | None = None,
    announce: Callable[[str], None] = line_without_bars,
) -> Built:
    """Resolve every "auto", build an engine, and log a line about it.

    Args:
        config: the settings of the user.
        on_compile: called between loading and compiling.
        times: takes the phases of the start; None measures them from this call on.
        announce: called with a line of text before loading, if `config.progress` is set.

    Raises:
        ConfigError: a setting, a model directory or a checkpoint is wrong; `param` names the setting.
    """
    built = _build(config, on_compile, times or StartTimes(), announce)
    logger.info("%s", built.summary.line(config.model))
    return built


def _build(
    config: EngineConfig, on_compile: Callable[[], None] | None, times: StartTimes, announce: Callable[[str], None]
) -> Built:
    check_settings(config)
    if config.trace_file is not None:
        check_trace_file(config.trace_file)
    if config.n_workers > 1:
        logger.warning(
            "n_workers is %d, but the model has one pipeline stage: the batches take turns on it, so only the time of "
            "the host is hidden, and each token waits for %d iterations; 1 is faster if the device is busy",
            config.n_workers,
            config.n_workers,
        )
    if is_toy(config.model):
        return _build_toy(config, times)
    source = model_directory(config.model) or config.model
    model = read_model_config(source)
    tokenizer = _tokenizer(config, source)
    max_model_len = _max_model_len(config, model)
    check_weights(source, config.load_format)
    if config.progress:
        announce(f"loading and compiling {config.model}")
    with times.phase("import"):
        from orca_jax.exec.ahead import CompiledAhead
        from orca_jax.exec.compile import compile_cache
        from orca_jax.exec.executor import JaxExecutor
        from orca_jax.exec.programs import Programs
        from orca_jax.model.load import prepare_load, tensor_mesh

    config, self_tests = _test_kernels(config, model)
    devices = claim_devices(config, model)
    platform = devices[0].platform
    check_platform(config, platform)
    mesh = tensor_mesh(devices)
    weights = prepare_load(
        source, dtype=_dtype(config, platform), load_format=config.load_format, seed=config.seed, config=model
    )
    shapes = _unstacked(weights.shapes(mesh), platform)
    held = shapes.config  # of the mesh: it may hold more key/value heads than the model has
    resolved = _resolve(config, held, max_model_len, devices, shapes)
    # These may raise errors, so they come before the weights are read and minutes of compilation.
    _, pool = build_scheduling(config, model, max_model_len, resolved.cache, resolved.buckets[-1])
    attention = _log_attention(held, resolved, mesh)
    with (
        compile_cache(resolved.compile_cache),
        CompiledAhead(Programs(shapes, held, resolved, mesh), times) as ahead,
    ):
        with times.phase("load"):
            decoder = _unstacked(weights.load(mesh, progress_bar("Loading", config.progress)), platform)
        if on_compile is not None:
            on_compile()
        compiling = progress_bar("Compiling", config.progress)
        executor = JaxExecutor(decoder, held, resolved, mesh, compiling, ahead=ahead, times=times)
    budget = token_budget(config, platform, executor.launch_seconds)
    scheduler = build_scheduler(config, resolved.cache, budget)
    header = _timeline_header(config, resolved.cache, max_model_len, budget, resolved.buckets)
    engine = Engine(executor, scheduler, pool, seed=config.seed, observer=_observer(header))
    device = mesh.devices.flat[0].device_kind
    summary = summary_of(header, pool.kv, times.report(), resolved, device, attention)
    return replace(_built(engine, tokenizer, model, header, summary, resolved), self_tests=self_tests)


def _test_kernels(config: EngineConfig, model: ModelConfig) -> tuple[EngineConfig, tuple[SelfTest, ...]]:
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
    dtype = _dtype(config, "gpu")
    chips = config.tensor_parallel_size or 1
    check_divisible(model, chips)
    held = on_shards(model, chips)
    trial = Trial(
        num_heads=held.num_heads // chips,
        num_kv_heads=held.num_kv_heads // chips,
        head_dim=held.head_dim,
        page_size=config.page_size or _PAGE_SIZE,
        dtype=dtype,
        page_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        implementation=config.attention_implementation,
    )
    outcome = try_implementations(trial, cache_directory(config.compile_cache))
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


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    length = config.max_model_len or model.max_positions
    if length > model.max_positions:
        raise ConfigError(
            f"max_model_len {length} is more than the model's {model.max_positions} positions; lower it",
            param="max_model_len",
        )
    return length


def _tokenizer(config: EngineConfig, source: str) -> Tokenizer:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    return ByteTokenizer() if is_preset(source) else load_tokenizer(source)


def _unstacked(decoder: "Decoder", platform: str) -> "Decoder":
    """The same decoder in the form that suits the platform."""
    if platform != "tpu":  # on CPUs and GPUs a scan over layers would copy the weights of every layer
        decoder.unstack(switched=platform == "cpu")
    return decoder


def _resolve(
    config: EngineConfig, model: ModelConfig, max_model_len: int, devices: "list[jax.Device]", shapes: "Decoder"
) -> ExecutorConfig:
    """Choose shapes and devices. The size of the cache follows from the memory left by the model's `shapes`."""
    from orca_jax.exec.cache import free_memory, size_cache, weight_bytes, workspace_bytes

    platform = devices[0].platform
    dtype = _dtype(config, platform)
    # A CPU converts other types in each product of attention.
    is_kept = platform != "cpu" or (dtype == "bfloat16" and multiplies_bfloat16())
    cache_auto: DType = dtype if is_kept else "float32"
    cache_dtype = cache_auto if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    buckets = launch_sizes(config, platform)
    page_size = config.page_size or _PAGE_SIZE
    rows = num_rows(config)
    layout: PageLayout = "head_major" if platform == "cpu" else "packed"
    if config.num_pages is not None:
        cache = CacheConfig(config.num_pages, page_size, cache_dtype, layout)
    else:
        workspace = workspace_bytes(model, buckets[-1], rows, max_model_len, len(devices))
        needed = weight_bytes(shapes) + workspace
        memory = free_memory(devices, config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION, needed)
        cache = size_cache(
            model, page_size=page_size, dtype=cache_dtype, memory=memory, num_rows=rows, max_model_len=max_model_len
        )
        cache = replace(cache, layout=layout)
    return ExecutorConfig(
        dtype=dtype,
        tensor_parallel_size=len(devices),
        buckets=buckets,
        num_rows=rows,
        max_model_len=max_model_len,
        cache=cache,
        attention_implementation=config.attention_implementation,
        compile_cache=cache_directory(config.compile_cache),
        strict_compile=config.strict_compile,
        max_steps=max(config.check_in_intervals or (1,)),
    )


def _log_attention(model: ModelConfig, config: ExecutorConfig, mesh: "Mesh") -> str:
    """Return the implementation of attention. Log the reason; warn if the device has a faster one for other settings.

    Raises:
        ConfigError: the configured implementation cannot do these shapes on this device.
    """
    from orca_jax.exec.layers import explain_attention

    try:
        choice = explain_attention(model, config, mesh)
    except NotImplementedError as error:
        raise ConfigError(f"{error}; leave attention_implementation out", param="attention_implementation") from None
    level = logging.WARNING if choice.is_slow else logging.INFO
    slowly = ". It is slower than the kernels named here" if choice.is_slow else ""
    logger.log(level, "attention by %r: %s%s", choice.backend.name, choice.reason, slowly)
    return choice.backend.name


def _timeline_header(
    config: EngineConfig, cache: CacheConfig, max_model_len: int, budget: int, buckets: tuple[int, ...] = ()
) -> TimelineHeader:
    offset = time.time() - time.monotonic()
    return TimelineHeader(TIMELINE_VERSION, config, cache, max_model_len, budget, buckets, offset)


def _observer(header: TimelineHeader) -> TimelineWriter | None:
    path = header.config.trace_file
    return None if path is None else TimelineWriter(header, msgspec.json.Encoder().encode_lines, TimelineFile(path))


def _build_toy(config: EngineConfig, times: StartTimes) -> Built:
    """Build an engine with the toy model or its clock, for tests and load tests: it starts at once and needs no JAX."""
    check_toy(config)
    override = None if config.model == TOY else Clock(clock_latency(config.model))
    latency = TOY_LATENCY if config.model == TOY else clock_latency(config.model)
    max_model_len = _max_model_len(config, TOY_MODEL)
    page_size = config.page_size or TOY_PAGE_SIZE
    rows = num_rows(config)
    num_pages = config.num_pages or -(-rows * (max_model_len + page_size - 1) // page_size)
    cache = CacheConfig(num_pages, page_size, "float32")
    budget = config.max_num_batched_tokens or max(TOY_BUDGET, 2 * config.max_num_seqs)
    scheduler, pool = build_scheduling(config, TOY_MODEL, max_model_len, cache, budget)
    executor = ToyExecutor(
        TOY_MODEL.vocab_size, num_pages, page_size, rows, latency=latency, override=override, check_pages=False
    )
    header = _timeline_header(config, cache, max_model_len, budget)
    engine = Engine(executor, scheduler, pool, seed=config.seed, observer=_observer(header))
    tokenizer = _tokenizer(config, config.model)
    return _built(engine, tokenizer, TOY_MODEL, header, summary_of(header, pool.kv, times.report()))


def _dtype(config: EngineConfig, platform: str) -> DType:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if platform == "cpu" else "bfloat16"


def cache_directory(directory: str | None) -> str | None:
    """Return the directory of compiled programs; None: programs are not kept."""
    if directory != "auto":
        return directory
    try:
        return str(Path.home() / ".cache" / "orca-jax" / "programs")
    except RuntimeError:  # no HOME, and a user without an entry in the table of users, as in some containers
        logger.warning("there is no home directory for the compile cache, so programs are compiled at each start")
        return None
