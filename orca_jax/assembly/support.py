"""The table of support: what each setting needs of other settings, the model, the hosts and the platform."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from orca_jax.assembly.settings import (
    SCHEDULERS,
    check_numbers,
    is_toy,
    overlaps,
    reads_predictions,
    reuses_prefixes,
    traits_of,
)
from orca_jax.checks import did_you_mean
from orca_jax.config import PAGED_MIXERS, EngineConfig, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.hub import is_hub_name
from orca_jax.sched.scheduler import Traits

Moment = Literal["settings", "toy", "hosts", "model", "platform", "update", "events"]
MOMENTS: dict[Moment, str] = {
    "settings": "when the settings are read",
    "toy": "with the toy model or a clock",
    "hosts": "with more than one process",
    "model": "when the model is described",
    "platform": "when the devices are known",
    "update": "when weights are replaced",
    "events": "when events of the KV cache are published",
}
"""The moments of checks, and when each comes. A row is checked as soon as all facts that it reads are known."""


@dataclass(frozen=True)
class Facts:
    """What is known of an engine. The facts after the settings have defaults until they are known."""

    config: EngineConfig
    num_hosts: int = 1
    model: ModelConfig | None = None
    platform: str = ""
    dtype: str = ""  # of the weights

    @property
    def known(self) -> ModelConfig:
        """The model, for rows that are checked when it is known."""
        assert self.model is not None, "the model is known at this moment"
        return self.model

    @property
    def implementations(self) -> tuple[str, ...]:
        """The implementations of attention on the platform."""
        from orca_jax.kernels.ragged_attention import implementations

        return tuple(implementations(self.platform))

    @property
    def choices(self) -> str:
        """The names of `implementations`."""
        return ", ".join(self.implementations)

    @property
    def meant(self) -> str:
        """A hint at the implementation that is like the chosen one; empty if there is none."""
        return did_you_mean(str(self.config.attention_implementation), self.implementations)


class Need(NamedTuple):
    """A setting honoured by some engines only."""

    setting: str
    without_effect: tuple[object, ...]  # values that ask for nothing; the first one is the default
    is_met: Callable[[Facts], bool]
    reason: str  # a format with the field `f`, the facts
    moment: Moment = "settings"

    def is_unmet(self, facts: Facts) -> bool:
        """Return True if the setting is in use and these facts do not meet the need."""
        value = getattr(facts.config, self.setting, None)  # None: a setting of the server
        return value not in self.without_effect and not self.is_met(facts)


def _able(has_trait: Callable[[Traits], bool]) -> str:
    return " or ".join(name for name, kind in SCHEDULERS.items() if has_trait(kind.traits))


def _of_schedulers(setting: str, idle: tuple[object, ...], has_trait: Callable[[Traits], bool], why: str) -> Need:
    """Make the need of a setting for schedulers with a trait."""
    reason = f"{setting} needs scheduler {_able(has_trait)}: {{f.config.scheduler}} {why}; leave it out"
    return Need(setting, idle, lambda f: has_trait(traits_of(f.config)), reason)


def _of_adapters(setting: str, default: object) -> Need:
    """Make the need of a setting for adapters."""
    reason = f"{setting} needs enable_lora; give enable_lora, or leave {setting} out"
    return Need(setting, (default,), lambda f: f.config.enable_lora, reason)


def _of_devices(setting: str, *idle: object) -> Need:
    """Make the need of a setting for a model with weights on devices."""
    reason = f"{setting} has no effect on {{f.config.model}}, which has no weights and no device; leave it out"
    return Need(setting, idle, lambda f: not is_toy(f.config.model), reason, "toy")


def _drafts_by_model(facts: Facts) -> bool:
    return facts.config.speculative_config is not None and facts.config.speculative_config.model is not None


NEEDS: tuple[Need, ...] = (
    _of_adapters("max_loras", None),
    _of_adapters("max_lora_rank", None),
    _of_adapters("max_cpu_loras", None),
    _of_adapters("lora_modules", ()),
    Need(
        "revision",
        (None,),
        lambda f: is_hub_name(f.config.model),
        "revision has no effect on {f.config.model}, which is not a name of the Hub; leave it out",
    ),
    Need(
        "download_dir",
        (None,),
        lambda f: any(is_hub_name(name) for name in (f.config.model, f.config.tokenizer or "")),
        "download_dir has no effect on {f.config.model}, which is not a name of the Hub; leave it out",
    ),
    Need(
        "load_format",
        ("auto", "safetensors", "dummy"),
        lambda f: not is_hub_name(f.config.model),
        "load_format orbax needs a directory: models of the Hub are loaded from safetensors; leave it out",
    ),
    _of_schedulers("scheduling_policy", ("fcfs",), lambda traits: traits.has_orderings, "has one order, by arrival"),
    Need(
        "n_workers",
        (None, 1),
        lambda f: traits_of(f.config).has_workers or f.config.pipeline_parallel_size > 1,
        f"n_workers needs pipeline_parallel_size above 1, or scheduler {_able(lambda traits: traits.has_workers)}: "
        "{f.config.scheduler} decides itself about its iterations in flight on one stage; leave it out",
    ),
    _of_schedulers(
        "n_slots", (None,), lambda traits: traits.has_reservations, "reserves nothing, and num_pages bounds its memory"
    ),
    _of_schedulers("overlap", (None, False), lambda traits: traits.has_overlap, "does not overlap iterations"),
    Need(
        "overlap",
        (None, False),
        lambda f: f.config.pipeline_parallel_size == 1,
        "overlap needs pipeline_parallel_size 1, not {f.config.pipeline_parallel_size}: a pipeline has iterations "
        "of other requests in flight; leave it out, and give a larger n_workers to hide the time of the host",
    ),
    _of_schedulers(
        "enable_prefix_caching", (None, False), lambda traits: traits.shares_prefixes, "has no prefix cache"
    ),
    _of_schedulers("itl_target_ms", (None,), lambda traits: traits.has_token_budget, "has no token budget"),
    Need(
        "itl_target_ms",
        (None,),
        lambda f: f.config.max_num_batched_tokens is None,
        "itl_target_ms has no effect with max_num_batched_tokens {f.config.max_num_batched_tokens}, which sets the "
        "token budget itself; leave one of them out",
    ),
    Need(
        "check_in_interval",
        (1,),
        lambda f: overlaps(f.config) and f.config.speculative_config is None,
        f"check_in_interval needs scheduler {_able(lambda traits: traits.has_overlap)} with overlap, in one stage and "
        "without speculative_config: iterations are submitted ahead as overlap does, and a proposal needs the newest "
        "token; leave it out",
    ),
    Need(
        "decoder",
        (None,),
        lambda f: f.config.pipeline_parallel_size == 1,
        "decoder needs pipeline_parallel_size 1, not {f.config.pipeline_parallel_size}: a decoder of your own has "
        "all layers in one stage; leave pipeline_parallel_size out, or share each layer by tensor_parallel_size",
    ),
    Need(
        "length_predictor",
        (None,),
        lambda f: reads_predictions(f.config),
        "length_predictor has no effect with scheduling_policy {f.config.scheduling_policy}, which reads no "
        "predictions; leave it out, or give scheduling_policy shortest",
    ),
    _of_devices("decoder", None),
    _of_devices("load_format", "auto", "dummy"),
    _of_devices("dtype", "auto"),
    _of_devices("quantization", None),
    _of_devices("kv_cache_dtype", "auto"),
    _of_devices("tensor_parallel_size", None, 1),
    _of_devices("gpu_memory_utilization", None),
    _of_devices("attention_implementation", None),
    _of_devices("cpu_products", "auto"),
    _of_devices("compile_cache", "auto", None),
    _of_devices("itl_target_ms", None),
    Need(
        "speculative_config",
        (None,),
        lambda f: not (is_toy(f.config.model) and _drafts_by_model(f)),
        "speculative_config: method draft_model has no effect on {f.config.model}; give method ngram",
        "toy",
    ),
    Need(
        "enable_lora",
        (False,),
        lambda f: f.num_hosts == 1,
        "enable_lora needs nnodes 1: adapters are loaded by one process",
        "hosts",
    ),
    Need(
        "cpu_products",
        ("auto", "xla"),
        lambda f: f.num_hosts == 1,
        "cpu_products native needs nnodes 1: hosts may differ; leave it out",
        "hosts",
    ),
    Need(
        "decoder",
        (None,),
        lambda f: f.num_hosts == 1,
        "decoder needs nnodes 1: a decoder of your own runs on one host",
        "hosts",
    ),
    Need(
        "speculative_config",
        (None,),
        lambda f: f.num_hosts == 1 or not _drafts_by_model(f),
        "speculative_config: method draft_model needs nnodes 1: the other hosts have no draft model; give ngram",
        "hosts",
    ),
    Need(
        "quantization",
        (None,),
        lambda f: f.known.decoder is None,
        "quantization {f.config.quantization} does not cover {f.known.decoder}, a decoder of your own; leave it out",
        "model",
    ),
    Need(
        "enable_lora",
        (False,),
        lambda f: f.known.experts is None,
        "enable_lora does not cover {f.known.family}, which has experts; leave it out",
        "model",
    ),
    Need(
        "enable_lora",
        (False,),
        lambda f: f.known.decoder is None,
        "enable_lora does not cover {f.known.decoder}, a decoder of your own; leave it out",
        "model",
    ),
    Need(
        "model",
        (),
        lambda f: not PAGED_MIXERS.isdisjoint(f.known.mixers),
        "{f.known.family}: a model needs a layer with attention, and all layers have {f.known.mixers[0]}",
        "model",
    ),
    Need(
        "speculative_config",
        (None,),
        lambda f: not f.known.has_states,
        "speculative_config does not cover {f.known.family}, whose layers keep states: a state cannot go back before "
        "refused proposals; leave it out",
        "model",
    ),
    Need(
        "enable_lora",
        (False,),
        lambda f: not f.known.has_states,
        "enable_lora does not cover {f.known.family}, whose layers keep states: adapters are for models with attention "
        "in all layers; leave it out",
        "model",
    ),
    Need(
        "quantization",
        (None,),
        lambda f: f.known.quantization in (None, f.config.quantization),
        "quantization {f.config.quantization} contradicts config.json of the model, which has {f.known.quantization} "
        "weights; leave quantization out, or convert the original model",
        "model",
    ),
    Need(
        "attention_implementation",
        (None,),
        lambda f: f.config.attention_implementation in f.implementations,
        "attention_implementation must be one of {f.choices} on {f.platform} devices, got "
        "{f.config.attention_implementation!r}{f.meant}",
        "platform",
    ),
    Need(
        "cpu_products",
        ("auto",),
        lambda f: f.platform == "cpu",
        "cpu_products has no effect on {f.platform} devices; leave it out",
        "platform",
    ),
    Need(
        "gpu_memory_utilization",
        (None,),
        lambda f: f.platform != "cpu",
        "gpu_memory_utilization has no effect on a CPU, where the KV cache takes a fixed share of the free memory; "
        "leave it out, or give num_pages",
        "platform",
    ),
    Need(
        "cpu_products",
        ("auto", "xla"),
        lambda f: f.known.decoder is None,
        "cpu_products native has no products with a decoder of your own: use xla",
        "platform",
    ),
    Need(
        "cpu_products",
        ("auto", "xla"),
        lambda f: f.known.quantization is None,
        "cpu_products native has no products with quantised weights: use xla",
        "platform",
    ),
    Need(
        "cpu_products",
        ("auto", "xla"),
        lambda f: f.dtype in ("float32", "bfloat16"),
        "cpu_products native has no products with weights in {f.dtype}: use xla",
        "platform",
    ),
    Need("model", (), lambda f: not is_toy(f.config.model), "the toy model has no weights to replace", "update"),
    Need(
        "nnodes",
        (),
        lambda f: f.num_hosts == 1,
        "weights are replaced in engines of one process: use nnodes 1, or replicas with an update of each",
        "update",
    ),
    Need(
        "quantization",
        (),
        lambda f: f.model is None or f.model.quantization is None,
        "quantised weights cannot be replaced, since each update would round them: leave quantization out",
        "update",
    ),
    Need(
        "kv_events_endpoint",
        (),
        lambda f: reuses_prefixes(f.config),
        "needs the prefix cache; use the scheduler chunked, and leave out --no-enable-prefix-caching",
        "events",
    ),
)
"""All refusals of combinations; docs/support.md lists them. The order is that of the checks within a moment."""


def refusal(facts: Facts, moment: Moment) -> ConfigError | None:
    """Return the error of the first unmet need of a moment; `param` names the setting. None if all are met."""
    need = next((need for need in NEEDS if need.moment == moment and need.is_unmet(facts)), None)
    return None if need is None else ConfigError(need.reason.format(f=facts), param=need.setting)


def check_support(facts: Facts, *moments: Moment) -> None:
    """Refuse settings that the engine cannot honour beside the facts of these moments.

    Raises:
        ConfigError: a need is not met; `param` names the setting.
    """
    for moment in moments:
        error = refusal(facts, moment)
        if error is not None:
            raise error


def quantised(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the model with the kind of quantisation that the settings ask for.

    Raises:
        ConfigError: the model cannot be served, or does not support a setting; `param` names the setting.
    """
    check_support(Facts(config, model=model), "model")
    return model if config.quantization is None else replace(model, quantization=config.quantization)


def check_settings(config: EngineConfig) -> None:
    """Refuse numbers out of range, settings in conflict, and settings without effect.

    Raises:
        ConfigError: `param` names the setting.
    """
    check_numbers(config)
    check_support(Facts(config), "settings")


def adapted(config: EngineConfig, keep: Collection[str] = ()) -> EngineConfig:
    """Return the settings without those of no use for this scheduler, except for those named in `keep`.

    It is for settings made for another scheduler, such as the recorded ones of a replay.
    """
    unmet = [need for need in NEEDS if need.moment == "settings" and need.is_unmet(Facts(config))]
    defaults: dict[str, Any] = {need.setting: need.without_effect[0] for need in unmet if need.setting not in keep}
    return adapted(replace(config, **defaults), keep) if defaults else config  # one setting may need another
