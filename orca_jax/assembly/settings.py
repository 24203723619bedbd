"""The choices of settings, and the refusal of settings in conflict or without effect."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from orca_jax.config import MAX_LORAS, EngineConfig, ModelConfig, Quantization
from orca_jax.errors import ConfigError
from orca_jax.hub import is_hub_name
from orca_jax.model.describe import check_served
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


class Need(NamedTuple):
    """A setting honoured by some engines only."""

    setting: str
    without_effect: tuple[object, ...]  # values that ask for nothing; the first one is the default
    is_met: Callable[[EngineConfig], bool]
    reason: Callable[[EngineConfig], str]


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


def _of_schedulers(
    setting: str, without_effect: tuple[object, ...], has_trait: Callable[[Traits], bool], why: str
) -> Need:
    """Make the need of a setting for schedulers with a trait."""

    def reason(config: EngineConfig) -> str:
        return f"{setting} needs scheduler {_able(has_trait)}: {config.scheduler} {why}; leave it out"

    return Need(setting, without_effect, lambda config: has_trait(traits_of(config)), reason)


def _able(has_trait: Callable[[Traits], bool]) -> str:
    return " or ".join(name for name, kind in SCHEDULERS.items() if has_trait(kind.traits))


def _of_adapters(setting: str, default: object) -> Need:
    """Make the need of a setting for adapters."""
    return Need(
        setting,
        (default,),
        lambda config: config.enable_lora,
        lambda config: f"{setting} needs enable_lora; give enable_lora, or leave {setting} out",
    )


NEEDS: tuple[Need, ...] = (
    _of_adapters("max_loras", None),
    _of_adapters("max_lora_rank", None),
    _of_adapters("max_cpu_loras", None),
    _of_adapters("lora_modules", ()),
    Need(
        "revision",
        (None,),
        lambda config: is_hub_name(config.model),
        lambda config: f"revision has no effect on {config.model}, which is not a name of the Hub; leave it out",
    ),
    Need(
        "download_dir",
        (None,),
        lambda config: any(is_hub_name(name) for name in (config.model, config.tokenizer or "")),
        lambda config: f"download_dir has no effect on {config.model}, which is not a name of the Hub; leave it out",
    ),
    _of_schedulers("scheduling_policy", ("fcfs",), lambda traits: traits.has_orderings, "has one order, by arrival"),
    Need(
        "n_workers",
        (None, 1),
        lambda config: traits_of(config).has_workers or config.pipeline_parallel_size > 1,
        lambda config: (
            f"n_workers needs pipeline_parallel_size above 1, or scheduler {_able(lambda traits: traits.has_workers)}: "
            f"{config.scheduler} decides itself about its iterations in flight on one stage; leave it out"
        ),
    ),
    _of_schedulers(
        "n_slots", (None,), lambda traits: traits.has_reservations, "reserves nothing, and num_pages bounds its memory"
    ),
    _of_schedulers("overlap", (None, False), lambda traits: traits.has_overlap, "does not overlap iterations"),
    Need(
        "overlap",
        (None, False),
        lambda config: config.pipeline_parallel_size == 1,
        lambda config: (
            f"overlap needs pipeline_parallel_size 1, not {config.pipeline_parallel_size}: a pipeline has iterations "
            "of other requests in flight; leave it out, and give a larger n_workers to hide the time of the host"
        ),
    ),
    _of_schedulers(
        "enable_prefix_caching", (None, False), lambda traits: traits.shares_prefixes, "has no prefix cache"
    ),
    _of_schedulers("itl_target_ms", (None,), lambda traits: traits.has_token_budget, "has no token budget"),
    Need(
        "itl_target_ms",
        (None,),
        lambda config: config.max_num_batched_tokens is None,
        lambda config: (
            f"itl_target_ms has no effect with max_num_batched_tokens {config.max_num_batched_tokens}, which sets the "
            "token budget itself; leave one of them out"
        ),
    ),
    Need(
        "check_in_interval",
        (1,),
        lambda config: overlaps(config) and config.pipeline_parallel_size == 1 and config.speculative_config is None,
        lambda config: (
            f"check_in_interval needs scheduler {_able(lambda traits: traits.has_overlap)} with overlap, in one stage "
            "and without speculative_config: iterations are submitted ahead as overlap does, and a proposal needs the "
            "newest token; leave it out"
        ),
    ),
    Need(
        "decoder",
        (None,),
        lambda config: config.pipeline_parallel_size == 1,
        lambda config: (
            f"decoder needs pipeline_parallel_size 1, not {config.pipeline_parallel_size}: a decoder of your own has "
            "all layers in one stage; leave pipeline_parallel_size out, or share each layer by tensor_parallel_size"
        ),
    ),
    Need(
        "length_predictor",
        (None,),
        reads_predictions,
        lambda config: (
            f"length_predictor has no effect with scheduling_policy {config.scheduling_policy}, which reads no "
            "predictions; leave it out, or give scheduling_policy shortest"
        ),
    ),
)

TOY_HAS_NO: Mapping[str, tuple[object, ...]] = {
    "decoder": (None,),
    "load_format": ("auto", "dummy"),
    "dtype": ("auto",),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "tensor_parallel_size": (None, 1),
    "gpu_memory_utilization": (None,),
    "attention_implementation": (None,),
    "cpu_products": ("auto",),
    "compile_cache": ("auto", None),
    "itl_target_ms": (None,),
}
"""Settings of weights, devices and programs with their values for the toy model, which has none of the three."""


def check_settings(config: EngineConfig) -> None:
    """Refuse numbers out of range, settings in conflict, and settings without effect.

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
    check_loras(config)
    check_needs(config)
    if config.max_num_batched_tokens is not None:
        check_budget(config, config.max_num_batched_tokens)


def check_needs(config: EngineConfig) -> None:
    """Refuse settings without effect beside the others. Raises ConfigError; `param` names the setting."""
    for need in _unmet(config):
        raise ConfigError(need.reason(config), param=need.setting)


def num_loras(config: EngineConfig) -> int:
    """Return the number of adapters in one batch; 0 without adapters."""
    return (config.max_loras or MAX_LORAS) if config.enable_lora else 0


def most_loras(config: EngineConfig) -> int:
    """Return the number of adapters that may be loaded at once."""
    return config.max_cpu_loras or 4 * num_loras(config)


def check_loras(config: EngineConfig) -> None:
    """Refuse numbers and names of adapters that do not fit together. Raises ConfigError."""
    if not config.enable_lora:
        return
    most = most_loras(config)
    if most < num_loras(config):
        message = f"max_cpu_loras {most} is less than max_loras {num_loras(config)}; raise it"
        raise ConfigError(message, param="max_cpu_loras")
    if len(config.lora_paths) > most:
        message = f"lora_modules has {len(config.lora_modules)} adapters, more than max_cpu_loras {most}; raise it"
        raise ConfigError(message, param="lora_modules")


def check_lora_model(config: EngineConfig, model: ModelConfig) -> None:
    """Check that a model can have adapters. Raises ConfigError; `param` is "enable_lora"."""
    if config.enable_lora and model.experts is not None:
        message = f"enable_lora does not cover {model.family}, which has experts; leave it out"
        raise ConfigError(message, param="enable_lora")
    if config.enable_lora and model.decoder is not None:
        message = f"enable_lora does not cover {model.decoder}, a decoder of your own; leave it out"
        raise ConfigError(message, param="enable_lora")


def check_budget(config: EngineConfig, budget: int) -> None:
    """Refuse a token budget below the batch size: each running request needs a token in an iteration.

    Raises:
        ConfigError: `param` is "max_num_batched_tokens".
    """
    if traits_of(config).has_token_budget and budget < config.max_num_seqs:
        message = (
            f"max_num_batched_tokens {budget} is less than max_num_seqs {config.max_num_seqs}, so an iteration could "
            "not hold a token of each request; raise it, or lower max_num_seqs"
        )
        raise ConfigError(message, param="max_num_batched_tokens")


def is_toy(model: str) -> bool:
    """Return True for the toy model and its clocks."""
    return model == TOY or model.startswith(CLOCK_PREFIX)


def check_toy(config: EngineConfig) -> None:
    """Refuse settings without effect on the toy model.

    Raises:
        ConfigError: `param` names the setting.
    """
    for name, accepted in TOY_HAS_NO.items():
        if getattr(config, name) not in accepted:
            message = f"{name} has no effect on {config.model}, which has no weights and no device; leave it out"
            raise ConfigError(message, param=name)
    if config.speculative_config is not None and config.speculative_config.model is not None:
        message = f"speculative_config: method draft_model has no effect on {config.model}; give method ngram"
        raise ConfigError(message, param="speculative_config")


def check_quantization(kind: Quantization | None, model: ModelConfig) -> None:
    """Check that weights of this model can be quantised. Raises ConfigError; `param` is "quantization"."""
    if kind is None:
        return
    if model.decoder is not None:
        message = f"quantization {kind} does not cover {model.decoder}, a decoder of your own; leave it out"
        raise ConfigError(message, param="quantization")


def quantised(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model with the kind of quantisation that the settings ask for.

    Raises:
        ConfigError: the model is quantised in another kind already, it cannot be quantised, it cannot have the
            adapters that the settings ask for, or it cannot be served.
    """
    check_served(model)
    check_quantization(config.quantization, model)
    check_lora_model(config, model)
    if config.quantization is None:
        return model
    if model.quantization not in (None, config.quantization):
        message = (
            f"quantization {config.quantization} contradicts config.json of the model, which has {model.quantization} "
            "weights; leave quantization out, or convert the original model"
        )
        raise ConfigError(message, param="quantization")
    return replace(model, quantization=config.quantization)


def adapted(config: EngineConfig, keep: Collection[str] = ()) -> EngineConfig:
    """Return the settings without those of no use for this scheduler, except for those named in `keep`.

    It is for settings made for another scheduler, such as the recorded ones of a replay.
    """
    defaults: dict[str, Any] = {
        need.setting: need.without_effect[0] for need in _unmet(config) if need.setting not in keep
    }
    return adapted(replace(config, **defaults), keep) if defaults else config  # one setting may need another


def _unmet(config: EngineConfig) -> list[Need]:
    in_use = [need for need in NEEDS if getattr(config, need.setting) not in need.without_effect]
    return [need for need in in_use if not need.is_met(config)]
