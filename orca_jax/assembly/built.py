"""An engine with what its front ends need: its parts put together, and a summary of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from orca_jax.assembly.adapters import AdapterReader
from orca_jax.assembly.choices import TOY
from orca_jax.assembly.self_test import SelfTest
from orca_jax.assembly.support import Facts, check_support
from orca_jax.engine import Engine
from orca_jax.sched.drafts.model import ModelProposer
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.scheduler import Scheduler
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.timeline.read import encoded
from orca_jax.timeline.writer import TimelineFile, TimelineHeader, TimelineWriter
from orca_jax.values.cache_spec import LayerGroup
from orca_jax.values.config import EngineConfig, ExecutorConfig, ModelConfig
from orca_jax.values.startup import EngineSummary, StartReport, StateBlocks, WindowBlocks
from orca_jax.values.step import Executor

if TYPE_CHECKING:
    from orca_jax.assembly.executor import PlacedModel

PutInPlace = Callable[[Callable[[], None]], None]
"""Replaces the weights; calls its argument after each parameter. No iteration may be in flight."""

PrepareUpdate = Callable[[Any], PutInPlace]
"""Checks a tree of parameters, or a checkpoint at a path. It raises ConfigError, with the weights unchanged."""


def refuse_update(facts: Facts, source: Any) -> PutInPlace:
    """Refuse an update of an engine whose weights cannot be replaced. Raises ConfigError."""
    check_support(facts, "update")
    raise AssertionError("the update is refused")


def refuse_toy(source: Any) -> PutInPlace:
    """Refuse an update of the toy. Raises ConfigError."""
    return refuse_update(Facts(EngineConfig(TOY)), source)


@dataclass(frozen=True)
class Built:
    """An engine with what its front ends need. A context manager, which closes the engine at its end."""

    engine: Engine
    tokenizer: Tokenizer
    # compiles `SamplingParams.structured` to a constraint for `Engine.add_request`
    grammars: GrammarFactory
    model_config: ModelConfig
    max_model_len: int  # of one request, prompt and generated tokens together
    timeline_header: TimelineHeader  # the first line of a timeline of this engine
    summary: EngineSummary  # resolved settings, and the start
    prepare_update: PrepareUpdate  # see `assembly.weights`
    # of all weights, sharded; None: they cannot be replaced
    weight_shapes: Callable[[], Any] | None = None
    executor_config: ExecutorConfig | None = None  # None for the toy
    directory: str = ""  # of the chat template and the sampling defaults; empty for a preset
    read_adapter: AdapterReader | None = None  # None: the engine has no adapters
    proposer: ModelProposer | None = None  # with a draft model
    # of attention kernels, in order; the implementation after the failed is used
    self_tests: tuple[SelfTest, ...] = ()
    reads: frozenset[str] = frozenset()  # fields of callers that scheduler and order may read

    @property
    def start(self) -> StartReport:
        """Times and programs of the start."""
        return self.summary.start

    def close(self) -> None:
        """Free the device's memory. The engine cannot run afterwards."""
        if self.engine.outer is not None:
            self.engine.outer.close()
        self.engine.executor.close()
        if self.proposer is not None:
            self.proposer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def join_parts(
    executor: Executor,
    scheduler: Scheduler,
    pool: RequestPool,
    header: TimelineHeader,
    adapters: dict[str, Any],
) -> Engine:
    """Make an engine of its parts. `adapters` has the weights of each adapter by its digest; a timeline is written."""
    config = header.config
    observer = None
    if config.trace_file is not None:
        observer = TimelineWriter(header, encoded, TimelineFile(config.trace_file))
    return Engine(
        executor,
        scheduler,
        pool,
        seed=config.seed,
        observer=observer,
        weights=adapters,
        check_in_interval=config.check_in_interval,
    )


def summary_of(
    header: TimelineHeader,
    pool: RequestPool,
    start: StartReport,
    placed: "PlacedModel | None" = None,
    attention: str = "",
) -> EngineSummary:
    """Summarize an engine.

    Args:
        header: settings of the engine, its KV cache and its largest launch.
        pool: the pool of requests, with the KV cache.
        start: times and programs of the start.
        placed: the model on its devices; None without a device.
        attention: the name of the implementation.
    """
    longest = header.max_model_len
    kv = pool.kv
    summary = EngineSummary(
        max_model_len=longest,
        kv_tokens=kv.longest_request,
        kv_requests=kv.num_fitting(1, longest),
        token_budget=header.budget,
        scheduler=header.config.scheduler,
        start=start,
        page_size=kv.page_size,
        num_pages=kv.num_blocks[0],
        reuses_prefixes=pool.reuses_prefixes,
    )
    if placed is None:
        return summary
    from orca_jax.exec.cache import stage_bytes
    from orca_jax.exec.states import layer_bytes

    cache = header.cache
    dtype = placed.weights.dtype
    size = sum(layer_bytes(placed.config, dtype))
    most = header.budget if kv.n_slots is None else longest
    return replace(
        summary,
        device=placed.devices[0].device_kind,
        num_devices=len(placed.devices),
        dtype=dtype,
        kv_cache_dtype=cache.dtype,
        attention=attention,
        quantization=placed.config.quantization,
        products=placed.products,
        kv_groups=_by_window(cache.groups, kv.page_size, longest, most),
        kv_pools=kv.num_blocks if len(kv.num_blocks) > 1 else (),
        kv_states=StateBlocks(cache.num_states, kv.num_rows, size) if size else None,
        kv_bytes=sum(stage_bytes(cache, stage.shapes.span) for stage in placed.stages),
    )


def _by_window(
    groups: Sequence[LayerGroup], page_size: int, max_model_len: int, longest: int
) -> tuple[WindowBlocks, ...]:
    """The groups of layers by their window; empty if no group has one.

    Args:
        groups: the groups of the KV cache.
        page_size: tokens of a page.
        max_model_len: tokens of a full request.
        longest: most tokens of a request in one iteration.
    """
    if all(group.window is None for group in groups):
        return ()
    found = []
    for window in dict.fromkeys(group.window for group in groups):
        same = [group for group in groups if group.window == window]
        blocks = same[0].most_blocks(max_model_len, longest, page_size)
        found.append(
            WindowBlocks(sum(len(group.layers) for group in same), window, len(same), blocks)
        )
    return tuple(found)
