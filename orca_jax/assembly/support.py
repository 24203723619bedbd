"""The table of support: what each setting needs of other settings, the model, the hosts and the platform."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from orca_jax.assembly.choices import (
    Budget,
    Choices,
    check_numbers,
    choices_of,
)
from orca_jax.assembly.quantised import kind_of, weights_of
from orca_jax.helpers.bundled import is_elsewhere, is_gguf, is_preset
from orca_jax.helpers.hub import is_hub_name
from orca_jax.policy.kinds import PolicyKind
from orca_jax.sim.clock import CLOCK_PREFIX
from orca_jax.values.checks import did_you_mean, is_class_name
from orca_jax.values.config import SCHEDULERS, EngineConfig, ModelConfig, Traits
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_named

Moment = Literal[
    "settings", "numbers", "toy", "hosts", "model", "draft", "devices", "platform", "library", "update",
    "events",
]  # fmt: skip
MOMENTS: dict[Moment, str] = {
    "settings": "when the settings are read",
    "numbers": "when the numbers of settings are compared",
    "toy": "with the toy model or a clock",
    "hosts": "with more than one process",
    "model": "when the model is described",
    "draft": "when the draft model is described",
    "devices": "when the number of devices is known",
    "platform": "when the devices are known",
    "library": "when the library in C is loaded",
    "update": "when weights are replaced",
    "events": "when events of the KV cache are published",
}
"""The moments of checks, and when each comes. A row is checked as soon as all facts that it reads are known."""


WHOLE_SLICES = ("TPU v5 lite", "TPU v6 lite")
"""Kinds of TPUs, in JAX's names, whose slices of several hosts run programs of all chips alone.

For a part of such a slice the compiler refuses sums over its chips and transfers to other parts (docs/deployment.md).
"""


class AdapterNumbers(NamedTuple):
    """Numbers of adapters: in one batch, loaded at most, and loaded at start."""

    max_loras: int
    max_cpu_loras: int
    number: int


@dataclass(frozen=True)
class Facts:
    """What is known of an engine. The facts after the settings have defaults until they are known."""

    config: EngineConfig
    num_hosts: int = 1
    model: ModelConfig | None = None
    platform: str = ""
    dtype: str = ""  # of the weights
    shards: int = 1  # devices that share each layer
    num_devices: int = 0  # of this process
    device_kind: str = ""  # JAX's name
    draft: ModelConfig | None = None
    max_model_len: int = 0  # most tokens of a request
    source: str = ""  # the directory, file or preset of the model
    has_library: bool = True  # of matrix products on a CPU

    @cached_property
    def chosen(self) -> Choices:
        """The choices of the settings."""
        return choices_of(self.config)

    @property
    def known(self) -> ModelConfig:
        """The model, for rows that are checked when it is known."""
        assert self.model is not None, "the model is known at this moment"
        return self.model

    @property
    def outside(self) -> str:
        """The name of the scheduler or the order from outside."""
        kind = self.chosen.batches.kind
        return kind.name if isinstance(kind, PolicyKind) else self.config.scheduler

    @property
    def has_few_bits(self) -> bool:
        """True if the model has matrices of few bits, which the library multiplies in any type."""
        from orca_jax.model.gguf.weights import GgufFile

        if self.known.quantization is not None:
            return True
        if self.config.load_format == "dummy":
            return False
        if self.known.stored is not None:
            return not self.known.stored.is_of_experts  # the others decide about types
        return is_gguf(self.source) and GgufFile.open(Path(self.source)).has_few_bits()

    @property
    def proposing(self) -> ModelConfig:
        """The draft model, for rows that are checked when it is known."""
        assert self.draft is not None, "the draft model is known at this moment"
        return self.draft

    @property
    def stages(self) -> int:
        """The stages of a pipeline."""
        return self.config.pipeline_parallel_size

    @property
    def runs_whole_slices(self) -> bool:
        """True if a program needs all chips of all processes."""
        return self.num_hosts > 1 and self.device_kind in WHOLE_SLICES

    @property
    def drafter(self) -> str | None:
        """The setting of the draft model."""
        return (
            None if self.config.speculative_config is None else self.config.speculative_config.model
        )

    @property
    def loras(self) -> "AdapterNumbers":
        """The numbers of adapters."""
        lora = self.chosen.lora
        most = self.chosen.requests.most_loras
        return AdapterNumbers(lora.num_slots if lora else 0, most, len(self.config.lora_paths))

    @property
    def uneven(self) -> str:
        """The parts of the model that `shards` does not divide, and their divisors; empty if there are none."""
        from orca_jax.model.sharding import can_share, uneven_parts

        parts = uneven_parts(self.known, self.shards)
        fitting = (
            [n for n in range(1, self.known.num_heads + 1) if can_share(self.known, n)]
            if parts
            else []
        )
        return f"{' and '.join(parts)}; use one of {fitting}" if parts else ""

    @property
    def is_host(self) -> bool:
        """True if the devices are the processors of this machine."""
        return platform_named(self.platform).is_host

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


DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(EngineConfig)}


class Need(NamedTuple):
    """A setting honoured by some engines only."""

    setting: str
    is_met: Callable[[Facts], bool]
    reason: str  # a format with the field `f`, the facts
    moment: Moment = "settings"
    idle: tuple[object, ...] = ()  # values beside the default that ask for nothing
    always: bool = False  # the default needs it, too

    @property
    def without_effect(self) -> tuple[object, ...]:
        """Values that ask for nothing; the first one is the default."""
        return () if self.always else (DEFAULTS[self.setting], *self.idle)

    def is_unmet(self, facts: Facts) -> bool:
        """Return True if the setting is in use and these facts do not meet the need."""
        value = getattr(facts.config, self.setting, None)  # None: a setting of the server
        return value not in self.without_effect and not self.is_met(facts)


def _able(has_trait: Callable[[Traits], bool]) -> str:
    return " or ".join(name for name, row in SCHEDULERS.items() if has_trait(row.traits))


def _of_schedulers(
    setting: str, has_trait: Callable[[Traits], bool], why: str, *idle: object
) -> Need:
    """Make the need of a setting for schedulers with a trait."""
    reason = (
        f"{setting} needs scheduler {_able(has_trait)}: {{f.config.scheduler}} {why}; leave it out"
    )
    return Need(setting, lambda f: has_trait(f.chosen.traits), reason, idle=idle)


def _of_adapters(setting: str) -> Need:
    """Make the need of a setting for adapters."""
    reason = f"{setting} needs enable_lora; give enable_lora, or leave {setting} out"
    return Need(setting, lambda f: f.config.enable_lora, reason)


def _of_devices(setting: str, *idle: object) -> Need:
    """Make the need of a setting for a model with weights on devices."""
    reason = f"{setting} has no effect on {{f.config.model}}, which has no weights and no device; leave it out"
    return Need(setting, lambda f: not f.chosen.is_toy, reason, "toy", idle)


# fmt: off
NEEDS: tuple[Need, ...] = (
    _of_adapters("max_loras"),
    _of_adapters("max_lora_rank"),
    _of_adapters("max_cpu_loras"),
    _of_adapters("lora_modules"),
    Need("revision", lambda f: is_elsewhere(f.config.model),
         "revision has no effect on {f.config.model}, which is not a name of the Hub or a bucket; leave it out"),
    Need("download_dir",
         lambda f: is_hub_name(f.config.model) or is_hub_name(f.config.tokenizer or ""),
         "download_dir has no effect on {f.config.model}, which is not a name of the Hub; leave it out"),
    Need("load_format", lambda f: not is_hub_name(f.config.model),
         "load_format orbax needs a directory: models of the Hub are loaded from safetensors; leave it out",
         idle=("safetensors", "dummy")),
    _of_schedulers("scheduling_policy", lambda traits: traits.has_orderings, "has one order, by arrival"),
    Need("scheduler_options", lambda f: is_class_name(f.config.scheduler),
         "scheduler_options has no effect with scheduler {f.config.scheduler}; give --scheduler FILE.py:CLASS"),
    Need("max_num_rows", lambda f: isinstance(f.chosen.batches.kind, PolicyKind),
         "max_num_rows has no effect with scheduler {f.config.scheduler}, which never pauses a request; leave it out"),
    Need("max_num_rows", lambda f: f.chosen.requests.num_rows >= f.config.max_num_seqs * f.stages,
         "max_num_rows must be at least max_num_seqs for each stage, got {f.config.max_num_rows}"),
    Need("n_workers", lambda f: f.chosen.traits.has_workers or f.config.pipeline_parallel_size > 1,
         f"n_workers needs pipeline_parallel_size above 1, or scheduler {_able(lambda traits: traits.has_workers)}: "
         "{f.config.scheduler} decides itself about its iterations in flight on one stage; leave it out",
         idle=(1,)),
    _of_schedulers("n_slots", lambda traits: traits.has_reservations,
        "reserves nothing, and num_pages bounds its memory"),
    _of_schedulers("overlap", lambda traits: traits.has_overlap, "does not overlap iterations", False),
    Need("overlap", lambda f: f.config.pipeline_parallel_size == 1,
         "overlap needs pipeline_parallel_size 1, not {f.config.pipeline_parallel_size}: a pipeline has iterations "
         "of other requests in flight; leave it out, and give a larger n_workers to hide the time of the host",
         idle=(False,)),
    _of_schedulers("enable_prefix_caching", lambda traits: traits.shares_prefixes,
        "has no prefix cache", False),
    Need("retention", lambda f: f.chosen.requests.reuses_prefixes,
         "retention needs the prefix cache: use scheduler chunked with enable_prefix_caching, or leave it out"),
    Need("kv_disk", lambda f: f.chosen.requests.reuses_prefixes,
         "kv_disk needs the prefix cache: use scheduler chunked with enable_prefix_caching, or leave kv_disk out"),
    Need("kv_host_memory", lambda f: f.chosen.requests.reuses_prefixes,
         "kv_host_memory needs the prefix cache: use scheduler chunked with enable_prefix_caching, or leave it out"),
    Need("kv_disk_size", lambda f: f.config.kv_disk is not None,
         "kv_disk_size needs kv_disk; give kv_disk, or leave kv_disk_size out"),
    _of_schedulers("itl_target_ms", lambda traits: traits.has_token_budget, "has no token budget"),
    Need("itl_target_ms", lambda f: f.config.max_num_batched_tokens is None,
         "itl_target_ms has no effect with max_num_batched_tokens {f.config.max_num_batched_tokens}, which sets the "
         "token budget itself; leave one of them out"),
    Need("check_in_interval", lambda f: f.chosen.batches.num_ahead > 0 and f.config.speculative_config is None,
         f"check_in_interval needs scheduler {_able(lambda traits: traits.has_overlap)} with overlap, in one stage and "
         "without speculative_config: iterations are submitted ahead as overlap does, and a proposal needs the newest "
         "token; leave it out"),
    Need("decoder", lambda f: f.config.pipeline_parallel_size == 1,
         "decoder needs pipeline_parallel_size 1, not {f.config.pipeline_parallel_size}: a decoder of your own has "
         "all layers in one stage; leave pipeline_parallel_size out, or share each layer by tensor_parallel_size"),
    Need("length_predictor",
         lambda f: "predicted" in f.chosen.batches.reads or isinstance(f.chosen.batches.kind, PolicyKind),
         "length_predictor has no effect with scheduling_policy {f.config.scheduling_policy}, which reads no "
         "predictions; leave it out, or give scheduling_policy shortest"),
    Need("length_predictor", lambda f: "predicted" in f.chosen.batches.reads,
         "length_predictor has no effect: {f.outside} does not read `predicted`; leave it out, or name it in `reads`"),
    Need("decoder", lambda f: not is_gguf(f.config.model),
         "decoder cannot be combined with the GGUF file {f.config.model}; give a directory"),
    Need("load_format",
         lambda f: not (is_gguf(f.config.model) or is_preset(f.config.model)) or f.chosen.is_toy,
         "{f.config.model} has no weights in the format {f.config.load_format}; use auto or dummy",
         idle=("dummy",)),
    Need("max_cpu_loras", lambda f: not f.config.enable_lora or f.loras.max_cpu_loras >= f.loras.max_loras,
         "max_cpu_loras {f.loras.max_cpu_loras} is less than max_loras {f.loras.max_loras}; raise it", "numbers"),
    Need("lora_modules", lambda f: f.loras.number <= f.loras.max_cpu_loras,
         "lora_modules has {f.loras.number} adapters, more than max_cpu_loras {f.loras.max_cpu_loras}; raise it",
         "numbers"),
    Need("max_num_batched_tokens",
         lambda f: (
             (f.config.max_num_batched_tokens or 0) >= f.config.max_num_seqs or not f.chosen.traits.has_token_budget
         ),
         "max_num_batched_tokens {f.config.max_num_batched_tokens} is less than max_num_seqs "
         "{f.config.max_num_seqs}, so an iteration could not hold a token of each request; raise it, or lower "
         "max_num_seqs", "numbers"),
    _of_devices("decoder"),
    _of_devices("load_format", "dummy"),
    _of_devices("dtype"),
    _of_devices("quantization"),
    _of_devices("kv_cache_dtype"),
    _of_devices("logprobs_mode"),
    _of_devices("kv_disk"),
    _of_devices("kv_host_memory"),
    _of_devices("tensor_parallel_size", 1),
    _of_devices("gpu_memory_utilization"),
    _of_devices("attention_implementation"),
    _of_devices("cpu_products"),
    _of_devices("compile_cache", None),
    _of_devices("itl_target_ms"),
    Need("speculative_config", lambda f: not (f.chosen.is_toy and f.drafter),
         "speculative_config: method draft_model has no effect on {f.config.model}; give method ngram", "toy"),
    Need("model", lambda f: f.num_hosts == 1 or not f.config.model.startswith(CLOCK_PREFIX),
         "{f.config.model} needs nnodes 1: it reports the time, which differs between processes", "hosts",
         always=True),
    Need("enable_lora", lambda f: f.num_hosts == 1,
         "enable_lora needs nnodes 1: adapters are loaded by one process", "hosts"),
    Need("cpu_products", lambda f: f.num_hosts == 1,
         "cpu_products native needs nnodes 1: hosts may differ; leave it out", "hosts",
         idle=("xla",)),
    Need("kv_disk", lambda f: f.num_hosts == 1,
         "kv_disk needs nnodes 1: one process saves the pages of all devices; leave it out", "hosts"),
    Need("kv_host_memory", lambda f: f.num_hosts == 1,
         "kv_host_memory needs nnodes 1: one process saves the pages of all devices; leave it out", "hosts"),
    Need("decoder", lambda f: f.num_hosts == 1,
         "decoder needs nnodes 1: a decoder of your own runs on one host", "hosts"),
    Need("speculative_config", lambda f: f.num_hosts == 1 or not f.drafter,
         "speculative_config: method draft_model needs nnodes 1: the other hosts have no draft model; give ngram",
         "hosts"),
    Need("quantization", lambda f: f.known.decoder is None,
         "quantization {f.config.quantization} does not cover {f.known.decoder}, a decoder of your own; leave it out",
         "model"),
    Need("enable_lora", lambda f: f.known.experts is None,
         "enable_lora does not cover {f.known.family}, which has experts; leave it out", "model"),
    Need("enable_lora", lambda f: f.known.decoder is None,
         "enable_lora does not cover {f.known.decoder}, a decoder of your own; leave it out", "model"),
    Need("enable_lora", lambda f: f.known.latent is None and f.known.shared_blocks is None,
         "enable_lora does not cover {f.known.family}, with latents or shared weights; leave it out", "model"),
    Need("enable_lora", lambda f: f.known.attention_gate != "all",
         "enable_lora does not cover {f.known.family}, with queries and gates in one matrix; leave it out", "model"),
    Need("enable_lora", lambda f: f.known.wide is None and "attention_mamba" not in f.known.mixers,
         "enable_lora does not cover {f.known.family}, with two kinds of heads; leave it out", "model"),
    Need("pipeline_parallel_size", lambda f: not f.known.shares_keys and f.known.layer_inputs is None,
         "pipeline_parallel_size does not cover {f.known.family}: layers share keys, or have inputs beside the stream, "
         "and a stage passes on the stream alone; leave it out, or share each layer by tensor_parallel_size", "model"),
    Need("enable_lora", lambda f: not f.known.only_counts_tokens,
         "enable_lora does not cover {f.known.family}, which has no attention; leave it out", "model"),
    Need("model", lambda f: any(f.known.layer_caches),
         "{f.known.family}: a model needs a layer with attention, and all layers have {f.known.mixers[0]}", "model",
         always=True),
    Need("kv_disk", lambda f: f.known.decoder is None,
         "kv_disk does not cover {f.known.decoder}, a decoder of your own, whose code may change; leave it out",
         "model"),
    Need("speculative_config", lambda f: not f.known.has_states,
         "speculative_config does not cover {f.known.family}, whose layers keep states: a state cannot go back "
         "before refused proposals; leave it out", "model"),
    Need("quantization", lambda f: f.known.quantization in (None, weights_of(f.config.quantization)),
         "quantization {f.config.quantization} contradicts config.json of the model, which has "
         "{f.known.quantization} weights; leave quantization out, or convert the original model", "model"),
    Need("max_model_len", lambda f: (f.config.max_model_len or 0) <= f.known.max_positions,
         "max_model_len {f.config.max_model_len} is more than the model's {f.known.max_positions} positions; lower it",
         "model"),
    Need("pipeline_parallel_size", lambda f: f.chosen.is_toy or f.stages <= f.known.num_layers,
         "pipeline_parallel_size {f.stages} is more than the {f.known.num_layers} layers of the model; each stage "
         "needs one of them", "model"),
    Need("speculative_config", lambda f: f.proposing.wide is None,
         "speculative_config: the draft model {f.drafter}: {f.proposing.family} has pages of two shapes, and a draft "
         "model has those of one; give another model", "draft"),
    Need("speculative_config", lambda f: not f.proposing.has_states,
         "speculative_config: the draft model {f.drafter}: {f.proposing.family} keeps states, which cannot go back "
         "before refused proposals; give a model with attention in all layers", "draft"),
    Need("speculative_config", lambda f: f.proposing.vocab_size == f.known.vocab_size,
         "speculative_config: the draft model {f.drafter} has a vocabulary of {f.proposing.vocab_size} ids, and "
         "{f.config.model} of {f.known.vocab_size}; give a model with the same tokenizer", "draft"),
    Need("speculative_config", lambda f: f.proposing.max_positions >= f.max_model_len,
         "speculative_config: the draft model {f.drafter} has {f.proposing.max_positions} positions, and "
         "max_model_len is {f.max_model_len}; lower max_model_len, or give another model", "draft"),
    Need("tensor_parallel_size", lambda f: f.num_hosts > 1 or f.shards * f.stages <= f.num_devices,
         "tensor_parallel_size is {f.shards} and pipeline_parallel_size is {f.stages}, but this process sees "
         "{f.num_devices} {f.platform} devices; their product must not be more", "devices",
         always=True),
    Need("tensor_parallel_size", lambda f: not f.uneven,
         "tensor_parallel_size {f.shards} {f.uneven}", "devices", always=True),
    Need("quantization", lambda f: f.known.quantization != "int4" or f.known.experts is None or f.shards == 1,
         "quantization int4 does not cover experts on several devices: use int8", "devices",
         always=True),
    Need("tensor_parallel_size", lambda f: f.shards * f.stages % f.num_hosts == 0,
         "tensor_parallel_size {f.shards} times pipeline_parallel_size {f.stages} is not a multiple of the "
         "{f.num_hosts} processes", "devices", always=True),
    Need("pipeline_parallel_size", lambda f: not f.runs_whole_slices,
         "pipeline_parallel_size {f.stages}: on {f.device_kind} a slice of several hosts runs programs of all its "
         "chips alone, and a stage has a part of them; leave it out, and share each layer by tensor_parallel_size",
         "devices"),
    Need("tensor_parallel_size",
         lambda f: not f.runs_whole_slices or f.shards == f.num_hosts * f.num_devices,
         "tensor_parallel_size {f.shards}: on {f.device_kind} a slice of several hosts runs programs of all its chips "
         "alone; {f.num_hosts} hosts with {f.num_devices} chips each need their product, or take a slice of one host",
         "devices", always=True),
    Need("attention_implementation", lambda f: f.config.attention_implementation in f.implementations,
         "attention_implementation must be one of {f.choices} on {f.platform} devices, got "
         "{f.config.attention_implementation!r}{f.meant}", "platform"),
    Need("kv_host_memory", lambda f: not f.is_host,
         "kv_host_memory has no effect on a CPU, whose KV cache is host memory; set num_pages", "platform"),
    Need("cpu_products", lambda f: f.is_host,
         "cpu_products has no effect on {f.platform} devices; leave it out", "platform"),
    Need("cpu_products", lambda f: f.known.decoder is None,
         "cpu_products native has no products with a decoder of your own: use xla", "platform",
         idle=("xla",)),
    Need("cpu_products", lambda f: f.dtype in ("float32", "bfloat16"),
         "cpu_products native has no products with weights in {f.dtype}: use xla", "platform",
         idle=("xla",)),
    Need("cpu_products", lambda f: f.has_library,
         "cpu_products native needs Linux, a processor with AVX2 and FMA, and a C compiler (cc): use auto", "library",
         idle=("xla",)),
    Need("model", lambda f: not f.chosen.is_toy,
         "the toy model has no weights to replace", "update", always=True),
    Need("nnodes", lambda f: f.num_hosts == 1,
         "weights are replaced in engines of one process: use nnodes 1, or replicas with an update of each", "update",
         always=True),
    Need("quantization", lambda f: f.model is None or f.model.quantization is None,
         "quantised weights cannot be replaced, since each update would round them: leave quantization out", "update",
         always=True),
    Need("kv_events_endpoint", lambda f: f.chosen.requests.reuses_prefixes,
         "needs the prefix cache; use the scheduler chunked, and leave out --no-enable-prefix-caching", "events",
         always=True),
)
# fmt: on
"""All refusals of combinations of settings; docs/flags.md lists them. Those of other flags are `flags/needs.py`.

The order is that of the checks within a moment.
"""


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


def quantised(config: EngineConfig, model: ModelConfig, source: str = "") -> ModelConfig:
    """Return the model with the kind of quantisation that the settings ask for; the files are those of `source`.

    Raises:
        ConfigError: the model cannot be served, or does not support a setting; `param` names the setting.
    """
    check_support(Facts(config, model=model), "model")
    kind = kind_of(config.quantization, "" if config.load_format == "dummy" else source)
    return model if kind is None else replace(model, quantization=kind)


def check_settings(config: EngineConfig) -> Choices:
    """Refuse numbers out of range, settings in conflict, and settings without effect; return the choices.

    Raises:
        ConfigError: `param` names the setting.
    """
    check_numbers(config)
    facts = Facts(config)
    check_support(facts, "settings", "numbers")
    return facts.chosen


def check_budget(rule: Budget, tokens: int) -> None:
    """Refuse a token budget from elsewhere below the batch size, as if it was that of the settings.

    Raises:
        ConfigError: `param` is "max_num_batched_tokens".
    """
    if rule.has_token_budget:
        config = EngineConfig(max_num_seqs=rule.max_num_seqs, max_num_batched_tokens=tokens)
        check_support(Facts(config), "numbers")


def adapted(config: EngineConfig, keep: Collection[str] = ()) -> EngineConfig:
    """Return the settings without those of no use for this scheduler, except for those named in `keep`.

    It is for settings made for another scheduler, such as the recorded ones of a replay.
    """
    unmet = [need for need in NEEDS if need.moment == "settings" and need.is_unmet(Facts(config))]
    defaults: dict[str, Any] = {
        need.setting: need.without_effect[0] for need in unmet if need.setting not in keep
    }
    # one setting may need another
    return adapted(replace(config, **defaults), keep) if defaults else config
