"""Scheduler and pool from settings, with ordering and length predictor."""

from collections.abc import Callable, Mapping

from orca_jax.bundled import ranker_directory
from orca_jax.config import CacheConfig, EngineConfig, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.orderings.deadline import EarliestDeadline
from orca_jax.sched.orderings.fair import FairShare
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.orderings.priority import Priority
from orca_jax.sched.orderings.shortest import ShortestFirst
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.predict import ClientBound, Predictor, RunningQuantiles, Scored
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import Scheduler, SchedulerSettings, Traits

SCHEDULERS: Mapping[str, type[Scheduler]] = {
    "orca": OrcaScheduler,
    "request_level": RequestLevelScheduler,
    "chunked": ChunkedScheduler,
}
ORDERINGS: dict[str, Callable[[], Ordering]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "fair": FairShare,
    "deadline": EarliestDeadline,
    "shortest": ShortestFirst,
}
PREDICTORS: dict[str, Callable[[], Predictor]] = {"bound": ClientBound, "quantiles": RunningQuantiles}
MAX_STEPS = 256  # with more of them a new request waits for seconds on most devices
WATERMARK = 0.01  # share of all pages to keep free when a request is admitted beside others, as in vLLM


def build_scheduling(
    config: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    cache: CacheConfig,
    budget: int,
    predictor: Predictor | None = None,
) -> tuple[Scheduler, RequestPool]:
    """A scheduler and its pool. `budget` is the largest launch in tokens; `predictor` replaces the one of the settings.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    check_settings(config)
    predictor = predictor or _predictor(config, model)
    return _scheduler(config, cache, budget), _pool(config, model, max_model_len, cache, predictor)


def _predictor(config: EngineConfig, model: ModelConfig) -> Predictor:
    name = config.length_predictor
    if name in PREDICTORS:
        return PREDICTORS[name]()
    directory = ranker_directory(name)
    from orca_jax.ranker.storage import load_scorer

    scorer = load_scorer(directory)
    if scorer.vocab_size != model.vocab_size:
        message = (
            f"length_predictor {name} is for a vocabulary of {scorer.vocab_size} ids, and the model has "
            f"{model.vocab_size}; train another one"
        )
        raise ConfigError(message, param="length_predictor")
    return Scored(scorer)


def check_settings(config: EngineConfig) -> None:
    """Refuse numbers out of range, and settings in conflict.

    Raises:
        ConfigError: `param` names the setting.
    """
    names = ("max_num_seqs", "n_workers", "max_model_len", "n_slots", "tensor_parallel_size", "page_size", "num_pages")
    for name in (*names, "max_num_batched_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
    if not 0 < config.gpu_memory_utilization <= 1:
        message = f"gpu_memory_utilization must be in (0, 1], got {config.gpu_memory_utilization}"
        raise ConfigError(message, param="gpu_memory_utilization")
    if config.scheduler not in SCHEDULERS:
        message = f"scheduler must be one of {', '.join(SCHEDULERS)}, got {config.scheduler!r}"
        raise ConfigError(message, param="scheduler")
    if config.scheduling_policy not in ORDERINGS:
        message = f"scheduling_policy must be one of {', '.join(ORDERINGS)}, got {config.scheduling_policy!r}"
        raise ConfigError(message, param="scheduling_policy")
    traits = SCHEDULERS[config.scheduler].traits
    if config.scheduling_policy != "fcfs" and not traits.has_orderings:
        able = _names(lambda traits: traits.has_orderings)
        message = f"scheduling_policy {config.scheduling_policy} needs scheduler {able}, got {config.scheduler}"
        raise ConfigError(message, param="scheduling_policy")
    if not traits.has_reservations:
        _check_on_demand(config)
    if config.check_in_intervals is not None:
        _check_intervals(config.check_in_intervals, config)


def _names(has_trait: Callable[[Traits], bool]) -> str:
    return " or ".join(name for name, kind in SCHEDULERS.items() if has_trait(kind.traits))


def _check_on_demand(config: EngineConfig) -> None:
    """Refuse the settings of schedulers with reservations."""
    name = config.scheduler
    if config.n_workers != 1:
        message = f"n_workers must be 1 with scheduler {name}, which overlaps two iterations, got {config.n_workers}"
        raise ConfigError(message, param="n_workers")
    if config.n_slots is not None:
        message = f"n_slots must be left out with scheduler {name}, which reserves nothing; give num_pages"
        raise ConfigError(message, param="n_slots")


def _check_intervals(intervals: tuple[int, ...], config: EngineConfig) -> None:
    if len(intervals) != 2 or not 1 <= intervals[0] <= intervals[1] <= MAX_STEPS:
        message = f"check_in_intervals must be two integers, 1 <= K1 <= K2 <= {MAX_STEPS}, got {intervals}"
        raise ConfigError(message, param="check_in_intervals")
    if not SCHEDULERS[config.scheduler].traits.has_many_steps or config.overlap:
        able = _names(lambda traits: traits.has_many_steps)
        message = (
            f"check_in_intervals needs scheduler {able} without overlap: a device that runs many steps by itself "
            "leaves nothing to overlap; give --no-overlap"
        )
        raise ConfigError(message, param="check_in_intervals")


def _pool(
    config: EngineConfig, model: ModelConfig, max_model_len: int, cache: CacheConfig, predictor: Predictor
) -> RequestPool:
    """The pool of requests with its `KVManager`."""
    rows = num_rows(config)
    n_slots = config.n_slots
    traits = SCHEDULERS[config.scheduler].traits
    if traits.has_reservations and n_slots is None:
        n_slots = max(1, cache.num_slots - rows * (cache.page_size - 1))
    return RequestPool(
        KVManager(cache.num_pages, cache.page_size, rows, n_slots),
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model.eos_token_ids,
        reuses_prefixes=traits.shares_prefixes and config.enable_prefix_caching,
        predictor=predictor,
    )


def num_rows(config: EngineConfig) -> int:
    """The largest number of requests with rows."""
    return config.max_num_seqs * config.n_workers


def _scheduler(config: EngineConfig, cache: CacheConfig, largest_bucket: int) -> Scheduler:
    settings = SchedulerSettings(
        max_bs=config.max_num_seqs,
        n_workers=config.n_workers,
        token_budget=largest_bucket,
        ordering=ORDERINGS[config.scheduling_policy],
        overlap=config.overlap,
        watermark=int(WATERMARK * cache.num_pages),
        check_in_intervals=config.check_in_intervals,
    )
    return SCHEDULERS[config.scheduler].from_settings(settings)
