"""The summary of an engine, for its log, the front end and metrics."""

from dataclasses import replace
from typing import TYPE_CHECKING

from orca_jax.config import CacheConfig, ExecutorConfig
from orca_jax.sched.kv import KVManager
from orca_jax.startup import EngineSummary, StartReport, WindowBlocks
from orca_jax.timeline.writer import TimelineHeader

if TYPE_CHECKING:
    from orca_jax.assembly.executor import PlacedModel


def summary_of(
    header: TimelineHeader,
    kv: KVManager,
    start: StartReport,
    resolved: ExecutorConfig | None = None,
    attention: str = "",
    placed: "PlacedModel | None" = None,
) -> EngineSummary:
    """Summarize an engine.

    Args:
        header: settings of the engine, and its largest launch.
        kv: the KV cache.
        start: times and programs of the start.
        resolved: shapes and types of the executor; None without a device.
        attention: the name of the implementation.
        placed: the model on its devices; None without a device.
    """
    longest = header.max_model_len
    summary = EngineSummary(
        max_model_len=longest,
        kv_tokens=kv.longest_request,
        kv_requests=kv.num_fitting(1, longest),
        token_budget=header.budget,
        scheduler=header.config.scheduler,
        start=start,
        page_size=kv.page_size,
        num_pages=kv.num_blocks[0],
    )
    if resolved is None or placed is None:
        return summary
    return replace(
        summary,
        device=placed.devices[0].device_kind,
        num_devices=resolved.tensor_parallel_size * resolved.pipeline_parallel_size,
        dtype=resolved.dtype,
        kv_cache_dtype=resolved.cache.dtype,
        attention=attention,
        quantization=placed.config.quantization,
        products=placed.products,
        kv_groups=_by_window(resolved.cache, longest, header.budget if kv.n_slots is None else longest),
        kv_pools=kv.num_blocks if len(kv.num_blocks) > 1 else (),
    )


def _by_window(cache: CacheConfig, max_model_len: int, longest: int) -> tuple[WindowBlocks, ...]:
    """The groups of layers by their window; empty if no group has one.

    Args:
        cache: the KV cache.
        max_model_len: tokens of a full request.
        longest: most tokens of a request in one iteration.
    """
    if all(group.window is None for group in cache.groups):
        return ()
    found = []
    for window in dict.fromkeys(group.window for group in cache.groups):
        same = [group for group in cache.groups if group.window == window]
        blocks = same[0].most_blocks(max_model_len, longest, cache.page_size)
        found.append(WindowBlocks(sum(len(group.layers) for group in same), window, len(same), blocks))
    return tuple(found)
