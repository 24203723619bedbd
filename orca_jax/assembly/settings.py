"""The choices of settings, and the refusal of numbers out of range."""

from collections.abc import Callable, Mapping
from math import inf

from orca_jax.config import MAX_LORAS, EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.orderings.deadline import EarliestDeadline
from orca_jax.sched.orderings.fair import FairShare
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.orderings.priority import Priority
from orca_jax.sched.orderings.shortest import ShortestFirst
from orca_jax.sched.predict import ClientBound, Predictor, RunningQuantiles
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import KnownScheduler, Traits
from orca_jax.sim.clock import CLOCK_PREFIX

SCHEDULERS: Mapping[str, type[KnownScheduler]] = {
    "orca": OrcaScheduler,
    "request_level": RequestLevelScheduler,
    "chunked": ChunkedScheduler,
}
ORDERINGS: Mapping[str, type[Ordering]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "fair": FairShare,
    "deadline": EarliestDeadline,
    "shortest": ShortestFirst,
}
PREDICTORS: Mapping[str, Callable[[], Predictor]] = {"bound": ClientBound, "quantiles": RunningQuantiles}
TOY = "preset:toy"
MAX_AHEAD = 256  # iterations; with more of them a new request waits for seconds on most devices

_AT_LEAST_ONE = (
    "max_num_seqs", "n_workers", "max_model_len", "n_slots", "tensor_parallel_size", "pipeline_parallel_size",
    "page_size", "num_pages", "max_num_batched_tokens", "max_loras", "max_lora_rank", "max_cpu_loras",
    "check_in_interval",
)  # fmt: skip


def traits_of(config: EngineConfig) -> Traits:
    """Return the traits of the chosen scheduler."""
    return SCHEDULERS[config.scheduler].traits


def reuses_prefixes(config: EngineConfig) -> bool:
    """Return True if the engine has a prefix cache."""
    return traits_of(config).shares_prefixes and config.enable_prefix_caching is not False


def overlaps(config: EngineConfig) -> bool:
    """Return True if the next iteration is selected while one runs, before the tokens of this one are known.

    A pipeline has iterations of other requests in flight instead.
    """
    return traits_of(config).has_overlap and config.overlap is not False and config.pipeline_parallel_size == 1


def num_workers(config: EngineConfig) -> int:
    """Return the number of batches that take turns: by default one for each pipeline stage."""
    return config.n_workers or config.pipeline_parallel_size


def reads_predictions(config: EngineConfig) -> bool:
    """Return True if predicted output lengths decide something."""
    return ORDERINGS[config.scheduling_policy].reads_predictions


def check_numbers(config: EngineConfig) -> None:
    """Refuse numbers out of range.

    Raises:
        ConfigError: `param` names the setting.
    """
    for name in _AT_LEAST_ONE:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
    if config.check_in_interval > MAX_AHEAD:
        message = f"check_in_interval must be at most {MAX_AHEAD}, got {config.check_in_interval}"
        raise ConfigError(message, param="check_in_interval")
    target = config.itl_target_ms
    if target is not None and not 0 < target < inf:
        raise ConfigError(
            f"itl_target_ms must be a positive number of milliseconds, got {target}", param="itl_target_ms"
        )
    share = config.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {share}", param="gpu_memory_utilization")


def num_loras(config: EngineConfig) -> int:
    """Return the number of adapters in one batch; 0 without adapters."""
    return (config.max_loras or MAX_LORAS) if config.enable_lora else 0


def most_loras(config: EngineConfig) -> int:
    """Return the number of adapters that may be loaded at once."""
    return config.max_cpu_loras or 4 * num_loras(config)


def is_toy(model: str) -> bool:
    """Return True for the toy model and its clocks."""
    return model == TOY or model.startswith(CLOCK_PREFIX)
