"""Other scheduling over an engine that is built, so that a comparison is of nothing else."""

from orca_jax.build import TOY_BUDGET, Built, default_tokens
from orca_jax.config import CacheConfig, EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.scheduling import build_scheduling


def reschedule(built: Built, config: EngineConfig) -> None:
    """Give an idle engine another scheduler and an empty pool.

    Args:
        built: with what `config` does not change, and at least as large a launch.
        config: scheduling settings may differ; `max_num_batched_tokens` is the budget of `chunked`.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    engine = built.engine
    assert not engine.has_work, "requests are open"
    cache, largest, default = _shapes(built, config)
    budget = config.max_num_batched_tokens or min(default, largest)
    if budget > largest:
        message = f"max_num_batched_tokens {budget} is more than the largest launch, {largest}"
        raise ConfigError(message, param="max_num_batched_tokens")
    engine.scheduler, engine.pool = build_scheduling(config, built.model_config, built.max_model_len, cache, budget)


def _shapes(built: Built, config: EngineConfig) -> tuple[CacheConfig, int, int]:
    """Pages, tokens of the largest launch, and those that `config` would have by default."""
    if built.executor_config is None:
        kv = built.engine.pool.kv
        return CacheConfig(kv.num_pages, kv.page_size, "float32"), TOY_BUDGET, TOY_BUDGET
    import jax

    executor = built.executor_config
    return executor.cache, executor.buckets[-1], default_tokens(config, jax.default_backend())
