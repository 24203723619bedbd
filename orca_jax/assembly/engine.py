"""Builds a running engine from the settings of the user. Every "auto" is resolved here."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from orca_jax.assembly.adapters import adapter_reader, load_first
from orca_jax.assembly.built import (
    Built,
    PrepareUpdate,
    join_parts,
    refuse_update,
    summary_of,
)
from orca_jax.assembly.choices import Choices
from orca_jax.assembly.described import Described, describe
from orca_jax.assembly.devices import ONE_HOST, Host, devices_of_library
from orca_jax.assembly.products import begin_products, choose_products
from orca_jax.assembly.resolve import cache_directory, dtype_of, explain, resolve
from orca_jax.assembly.scheduler import (
    build_scheduler,
    build_scheduling,
    seconds_of,
    speculating,
    timeline_header,
)
from orca_jax.assembly.self_test import Outcome, try_kernels
from orca_jax.assembly.support import Facts, check_settings, check_support, refusal
from orca_jax.assembly.tiers import attach_tiers, open_tiers
from orca_jax.assembly.toy import build_toy
from orca_jax.cluster.messages import ModelJob
from orca_jax.helpers.console import line_without_bars
from orca_jax.timeline.writer import check_trace_file
from orca_jax.values.config import AttentionName, EngineConfig
from orca_jax.values.startup import StartTimes

if TYPE_CHECKING:
    from orca_jax.assembly.executor import PlacedModel
    from orca_jax.sched.drafts.model import ModelProposer

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
    choices = check_settings(config)
    check_support(Facts(config, host.num_hosts), "hosts")
    _warn_of_workers(choices.batches.n_workers, choices.devices.stages)
    if config.trace_file is not None:
        check_trace_file(config.trace_file)
    if not choices.is_toy:
        found = describe(config, choices.drafts)
        host.gather()
        if config.progress:
            announce(f"loading and compiling {config.model}")
        built = _EngineBuild(found, choices, host, times).run(on_compile)
    else:
        built = build_toy(config, choices, times, host)
    logger.info("%s", built.summary.line(config.model))
    return built


class _EngineBuild:
    """The steps from a described model to an engine."""

    def __init__(self, found: Described, choices: Choices, host: Host, times: StartTimes) -> None:
        self._found = found
        self._choices = choices
        self._host = host
        self._times = times

    def run(self, on_compile: Callable[[], None] | None) -> Built:
        """Place the model on its devices, load it, and compile its programs."""
        found = self._found
        choices = self._choices
        host = self._host
        directory = cache_directory(found.config.compile_cache)
        with self._times.phase("import"):
            if found.config.cpu_products != "xla" and host.num_hosts == 1:
                begin_products(directory)
            from orca_jax.assembly.executor import start_executor
            from orca_jax.assembly.weights import WeightUpdater

        config = found.config
        model = found.model
        max_model_len = found.max_model_len
        outcome = self._try_kernels(directory)
        if outcome.implementation is not None:
            config = replace(
                config, attention_implementation=cast(AttentionName, outcome.implementation)
            )
        placed, facts, proposer = self._place(config, directory)
        resolved = resolve(
            choices,
            max_model_len,
            placed,
            config.attention_implementation,
            host.free,
            directory,
            strict_compile=config.strict_compile,
        )
        # These may raise errors, so they come before the weights are read and minutes of compilation.
        _, pool = build_scheduling(
            choices, model, max_model_len, resolved.cache, resolved.buckets[-1]
        )
        tiers = open_tiers(choices.pages.tiers, found.source, config.seed, placed, resolved)
        implementation = explain(placed.config, resolved, placed.mesh)
        host.share(ModelJob(model, resolved, config.load_format, config.seed, config.revision))
        enough = partial(choices.budget.is_enough, placed.platform.name)
        local = start_executor(
            placed,
            resolved,
            self._times,
            on_compile,
            host.meet,
            has_bars=config.progress,
            is_enough=enough,
        )
        executor = host.lead(local)
        launches = local.launch_seconds
        budget = choices.budget.tokens(placed.platform.name, launches)
        plain = build_scheduler(
            choices.batches, resolved.cache.num_blocks, budget, seconds_of(launches)
        )
        scheduler = speculating(choices.drafts, plain, budget, launches, proposer)
        header = timeline_header(config, resolved.cache, max_model_len, budget, resolved.buckets)
        engine = join_parts(executor, scheduler, pool, header, local.adapters)
        attach_tiers(engine, local, tiers, launches)
        reader = adapter_reader(placed.config, resolved.lora, resolved.dtype)
        prepare_update: PrepareUpdate = partial(refuse_update, facts)
        weight_shapes = None
        if not refusal(facts, "update"):
            updater = WeightUpdater(placed, local, found.source)
            prepare_update = updater.prepare
            weight_shapes = updater.shapes
        return Built(
            engine=engine,
            tokenizer=found.tokenizer,
            grammars=found.grammars,
            model_config=model,
            max_model_len=max_model_len,
            timeline_header=header,
            read_adapter=load_first(engine, config.lora_paths, reader),
            summary=summary_of(header, pool, self._times.report(), placed, implementation),
            executor_config=resolved,
            prepare_update=prepare_update,
            weight_shapes=weight_shapes,
            directory=found.texts,
            proposer=proposer,
            self_tests=outcome.tests,
            reads=choices.batches.reads,
        )

    def _try_kernels(self, directory: str | None) -> Outcome:
        config = self._found.config
        pages = self._choices.pages
        tensor = self._choices.devices.tensor
        if not config.kernel_self_test:
            return Outcome()
        dtype = dtype_of(config.dtype, "gpu")
        attention = config.attention_implementation
        return try_kernels(
            self._found.model, dtype, tensor or 1, pages, attention, directory, self._host.num_hosts
        )

    def _place(
        self, config: EngineConfig, directory: str | None
    ) -> "tuple[PlacedModel, Facts, ModelProposer | None]":
        """Place the model, and start the draft model: later the KV cache takes the memory that is left."""
        from orca_jax.assembly.executor import place_model

        found = self._found
        choices = self._choices
        facts = Facts(config, self._host.num_hosts, found.model)
        stages = choices.devices.stages
        devices = self._host.devices(facts)
        plain = dtype_of(config.dtype, devices[0].platform)
        facts = replace(facts, platform=devices[0].platform, dtype=plain, source=found.source)
        check_support(facts, "platform")
        dtype, library = choose_products(facts, directory)
        if facts.is_host and config.gpu_memory_utilization is not None:
            logger.warning(
                "gpu_memory_utilization is for accelerators; num_pages sets the KV cache of a CPU"
            )
        shared = devices
        if library is not None and choices.devices.tensor is None:
            shared = devices_of_library(devices, facts.known, stages)
        placed = place_model(
            found.source,
            found.model,
            dtype=dtype,
            load_format=config.load_format,
            seed=config.seed,
            devices=shared,
            num_stages=stages,
            library=library,
        )
        proposer = None
        if found.draft is not None:
            own = devices[: len(devices) // stages]
            attention = config.attention_implementation
            proposer = found.draft.start(
                own, plain, choices.pages.size, attention, self._times, directory
            )
        return placed, replace(facts, model=placed.config, dtype=dtype), proposer


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
