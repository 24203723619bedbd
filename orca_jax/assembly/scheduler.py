"""Scheduler and pool from settings, with ordering and length predictor."""

from orca_jax.assembly.settings import (
    ORDERINGS,
    PREDICTORS,
    SCHEDULERS,
    most_loras,
    num_loras,
    num_workers,
    overlaps,
    reuses_prefixes,
    traits_of,
)
from orca_jax.assembly.support import check_budget, check_settings
from orca_jax.bundled import ranker_directory
from orca_jax.config import CacheConfig, EngineConfig, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.sched.adapters import AdapterSlots
from orca_jax.sched.blocks import count_of, most_slots
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.predict import Predictor, Scored
from orca_jax.sched.scheduler import KnownScheduler, SchedulerSettings

WATERMARK = 0.01  # share of all pages to keep free when a request is admitted beside others, as in vLLM


def build_scheduling(
    config: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    cache: CacheConfig,
    budget: int,
    predictor: Predictor | None = None,
) -> tuple[KnownScheduler, RequestPool]:
    """A scheduler and its pool. `budget` is the largest launch in tokens; `predictor` replaces the one of the settings.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    check_settings(config)
    check_budget(config, budget)
    predictor = predictor or _predictor(config, model)
    return build_scheduler(config, cache, budget), _pool(config, model, max_model_len, cache, budget, predictor)


def _predictor(config: EngineConfig, model: ModelConfig) -> Predictor:
    name = config.length_predictor or "bound"
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


def _pool(
    config: EngineConfig, model: ModelConfig, max_model_len: int, cache: CacheConfig, budget: int, predictor: Predictor
) -> RequestPool:
    """The pool of requests with its `KVManager`."""
    rows = num_rows(config)
    n_slots = config.n_slots
    if traits_of(config).has_reservations and n_slots is None:
        n_slots = max(1, most_slots(cache.groups, cache.num_blocks, cache.page_size, rows))
    return RequestPool(
        KVManager(
            cache.num_blocks,
            cache.page_size,
            rows,
            n_slots,
            groups=cache.groups,
            longest=budget if traits_of(config).has_token_budget else None,
            num_drafts=config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
            num_states=cache.num_states,
        ),
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model.eos_token_ids,
        reuses_prefixes=reuses_prefixes(config),
        predictor=predictor,
        adapters=AdapterSlots(num_loras(config), most_loras(config)),
    )


def num_rows(config: EngineConfig) -> int:
    """The largest number of requests with rows."""
    return config.max_num_seqs * num_workers(config)


def build_scheduler(config: EngineConfig, cache: CacheConfig, budget: int) -> KnownScheduler:
    """The scheduler alone, for checked settings. The arguments are those of `build_scheduling`."""
    settings = SchedulerSettings(
        max_bs=config.max_num_seqs,
        n_workers=num_workers(config),
        token_budget=budget,
        ordering=ORDERINGS[config.scheduling_policy],
        num_ahead=config.check_in_interval if overlaps(config) else 0,
        watermark=count_of([int(WATERMARK * number) for number in cache.num_blocks]),
        # More batches than stages count as stages: the token of a request is always known when it is selected again.
        num_stages=num_workers(config) if config.pipeline_parallel_size > 1 else 1,
    )
    return SCHEDULERS[config.scheduler].from_settings(settings)
