"""Settings: one small frozen dataclass per layer of the package.

Only `EngineConfig`, the settings of the user, may hold "auto" or None for "auto". `assembly/resolve.py` resolves them
once into the other classes. No setting is read from the environment.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from orca_jax.cache_spec import LayerCache, LayerGroup, PageShape
from orca_jax.checks import adapter_name_fault, check_known_or_class, check_values, names_checked
from orca_jax.errors import ConfigError
from orca_jax.layer_config import (
    PAGED_MIXERS,
    SHARED_MIXERS,
    STATELESS_MIXERS,
    DeltaRuleConfig,
    ExpertsConfig,
    KeySharing,
    LatentConfig,
    LayerInputs,
    LayerKind,
    MambaConfig,
    MixerName,
    Residual,
    ResidualFactors,
    RopeConfig,
    ShortConvConfig,
    WideConfig,
)

DType = Literal["float32", "bfloat16", "float16"]
PageDType = Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]  # of stored keys and values
KVCacheDType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]  # the same, with vLLM's name for float8
SchedulerName = Literal["orca", "request_level", "chunked"]
OrderingName = Literal["fcfs", "priority", "fair", "deadline", "shortest"]
PageLayout = Literal["head_major", "token_major"]  # the order of tokens in a page, see kernels/kv_pages.py
AttentionName = Literal["tpu", "gpu", "triton", "native", "gather", "xla", "reference"]  # see docs/kernels.md
CpuProducts = Literal["auto", "native", "xla"]  # see assembly/products.py
LoadFormat = Literal["auto", "safetensors", "orbax", "dummy"]
Quantization = Literal["int8", "int4", "fp8"]  # of weights, see model/quantise.py
QuantizationName = Literal[Quantization, "int8-dynamic", "int4-dynamic"]  # the last two also quantise activations
SpeculativeMethod = Literal["ngram", "draft_model"]  # see docs/speculation.md
DEFAULT_NGRAM = 5  # ids; as in vLLM
MAX_NGRAM = 64
MAX_DRAFTS = 16  # beyond some eight tokens, proposals are hardly ever accepted
_SPECULATIVE_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
MAX_LORAS = 8  # adapters in one batch by default
MAX_LORA_RANK = 16
GPU_MEMORY_UTILIZATION = 0.9  # default share of an accelerator's memory for this process


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Families differ only in these values and in the names of weights."""

    family: str
    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int  # of the MLP, or of each expert
    max_positions: int
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    activation: Literal["gelu_tanh", "gelu", "silu", "relu", "relu2"]
    gated_mlp: bool
    attention_bias: bool  # of queries, keys and values
    mlp_bias: bool
    tied_embeddings: bool
    rope: RopeConfig | None = None  # None: learned positions; see `windowed_rope`
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    attention_out_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None  # of queries and keys: of each head, or of all heads together
    qk_norm_last: bool = False  # the norms of heads come after their rotation
    value_norm: bool = False  # of each head's values, without weights
    attention_sinks: bool = False  # a score of each head joins the softmax and has no value
    attention_gate: Literal["head", "all"] | None = None  # a weight between 0 and 1 for each head, or for all numbers
    residual: Residual = "pre_norm"
    residual_factors: ResidualFactors | None = None  # of the residual "normed"
    residual_scale: float = 1.0  # factor on what attention and MLP add, of the residuals "pre_norm" and "both_norms"
    layer_scale: bool = False  # the stream after each layer is multiplied by a parameter of one number
    mixer_pattern: tuple[MixerName, ...] = ("attention",)  # of the layers; repeated over them
    wide: WideConfig | None = None  # of layers with the mixer wide_attention
    key_sharing: KeySharing | None = None  # None: each layer has keys and values of its own
    layer_inputs: LayerInputs | None = None  # None: layers have no inputs beside the stream
    latent: LatentConfig | None = None  # of layers with latent attention, which are then all with pages
    short_conv: ShortConvConfig | None = None  # of layers with this mixer
    delta_rule: DeltaRuleConfig | None = None  # of layers with this mixer
    mamba: MambaConfig | None = None  # likewise
    sliding_window: int | None = None  # tokens that each token sees, itself included, in layers with a window
    window_pattern: tuple[bool, ...] = (True,)  # whether a layer has the window; repeated over the layers
    rope_pattern: tuple[bool, ...] = (True,)  # whether a layer has `rope`, or none at all; repeated over the layers
    windowed_rope: RopeConfig | None = None  # of layers with the window; None: `rope` is that of all layers
    attention_scale: float | None = None  # factor on scores; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # scores s become cap * tanh(s / cap)
    logit_soft_cap: float | None = None  # likewise for logits
    head_bias: bool = False  # of the unembedding, which is then not the embedding
    logit_scale: float = 1.0  # factor on logits, before their cap
    embedding_scale: float = 1.0  # factor on token embeddings, rounded in the type of the parameters
    norm_bias: bool = True  # of norms of the kind layernorm
    norm_offset: float = 0.0  # added to the scales of all norms
    quantization: Quantization | None = None  # of linear layers and tables of the vocabulary; None: plain weights
    kv_copies: int = 1  # of each key/value head, counted in `num_kv_heads`; more than 1 only on many devices
    experts: ExpertsConfig | None = None  # None: each layer has one MLP
    weight_factors: tuple[tuple[str, tuple[float, ...]], ...] = ()  # by path, of equal parts of parameters' last axis
    text_family: str | None = None  # of a model for images and texts: the `model_type` of its texts
    decoder: str | None = None  # "module:Class" of a decoder outside this package, see model/own.py

    @property
    def active_mlp_dim(self) -> int:
        """The width of all MLPs that a token goes through in a layer, the widest one."""
        experts = self.experts
        if experts is None:
            return max(self.mlp_dim, self.other_mlps[1])
        return max(self.mlp_dim * experts.per_token + experts.shared_dim + experts.beside_dim, self.other_mlps[1])

    @property
    def other_mlps(self) -> tuple[tuple[int, ...], int]:
        """The layers with an MLP of another width, or with one in place of experts; and this width."""
        if self.experts is not None:
            return self.experts.dense_layers, self.experts.dense_dim
        sharing = self.key_sharing
        if sharing is None or sharing.mlp_dim == self.mlp_dim:
            return (), 0
        return tuple(range(self.num_layers - sharing.num_layers, self.num_layers)), sharing.mlp_dim

    def of_mixer(self, mixer: str) -> "ModelConfig":
        """The same model, with the sizes of one kind of attention as those of all heads."""
        if self.wide is None or not mixer.startswith("wide_"):
            return self
        sizes = {name: getattr(self.wide, name) for name in ("head_dim", "num_kv_heads", "kv_copies")}
        return replace(self, **sizes)

    @cached_property
    def score_scale(self) -> float:
        """The factor on the products of queries and keys."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        windowed = LayerKind(self.sliding_window, self.windowed_rope or self.rope)
        kinds = [windowed if has_window else LayerKind(None, self.rope) for has_window in self.window_pattern]
        mixers, ropes = self.mixer_pattern, self.rope_pattern
        found = [kinds[i % len(kinds)]._replace(mixer=mixers[i % len(mixers)]) for i in range(self.num_layers)]
        for layer in self.other_mlps[0]:
            found[layer] = found[layer]._replace(mlp="dense_mlp")
        if self.residual == "single":
            found = [kind if kind.mixer == "no_mixer" else kind._replace(mlp="no_mlp") for kind in found]
        return tuple(kind if ropes[i % len(ropes)] else kind._replace(rope=None) for i, kind in enumerate(found))

    def layers_with_part(self, name: str) -> tuple[int, ...]:
        """The layers with a mixer or an MLP of this name; all layers for other names."""
        found = tuple(layer for layer, kind in enumerate(self.layer_kinds) if name in kind.parts)
        return found or tuple(range(self.num_layers))

    def layers_with(self, mixer: MixerName) -> tuple[int, ...]:
        """The layers with a mixer."""
        return tuple(layer for layer, kind in enumerate(self.layer_kinds) if kind.mixer == mixer)

    @property
    def mixers(self) -> tuple[MixerName, ...]:
        """The different mixers of the model, in the order of their first layers."""
        return tuple(dict.fromkeys(kind.mixer for kind in self.layer_kinds))

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state of each request in place of pages."""
        return not STATELESS_MIXERS.issuperset(self.mixers)

    @property
    def page_shape(self) -> PageShape:
        """The shape of the pages of layers with attention, but not of those with wide heads."""
        if self.latent is not None:
            return PageShape(self.num_kv_heads, self.latent.rank + self.latent.rotated_dim, has_values=False)
        return PageShape(self.num_kv_heads, self.head_dim)

    @cached_property
    def layer_caches(self) -> tuple[LayerCache | None, ...]:
        """The keys and values that each layer keeps; None for layers with a state in their place."""
        return tuple(
            LayerCache(self.of_mixer(kind.mixer).page_shape, kind.window) if kind.mixer in PAGED_MIXERS else None
            for kind in self.layer_kinds
        )

    def layer_of_pages(self, layer: int) -> int:
        """The layer whose pages a layer reads: itself, or the last earlier one with the same heads."""
        mixer = SHARED_MIXERS.get(self.layer_kinds[layer].mixer)
        return layer if mixer is None else max(other for other in self.layers_with(mixer) if other < layer)


def page_dtype(name: KVCacheDType) -> PageDType:
    """The type of the stored keys and values, by its name in the settings."""
    return "float8_e4m3fn" if name == "fp8" else name


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache: blocks, each with a page of `page_size` tokens in every layer of a group."""

    groups: tuple[LayerGroup, ...]  # of the whole model, see cache_spec.py
    num_blocks: tuple[int, ...]  # of each pool; the first one is `EngineConfig.num_pages`
    page_size: int
    dtype: PageDType
    layout: PageLayout = "head_major"
    num_states: int = 0  # blocks of recurrent states, see cache_spec.py; 0: no layer has a state

    @property
    def num_slots(self) -> int:
        """Slots in the blocks of the first pool; a slot holds the keys and values of one token in a group."""
        return self.num_blocks[0] * self.page_size


@dataclass(frozen=True)
class LoraConfig:
    """The adapters on the devices."""

    num_slots: int  # adapters in one batch
    max_rank: int


@dataclass(frozen=True)
class ExecutorConfig:
    """Shapes and devices of the executor."""

    dtype: DType
    tensor_parallel_size: int
    buckets: tuple[int, ...]  # ascending padded token counts T, each compiled at start
    num_rows: int
    max_model_len: int
    cache: CacheConfig
    attention_implementation: str | None = None  # None: the backend's default
    compile_cache: str | None = None  # directory; None: no persistent cache
    strict_compile: bool = False  # a compile while serving raises
    pipeline_parallel_size: int = 1  # stages, each on `tensor_parallel_size` devices
    lora: LoraConfig | None = None  # None: no adapters
    num_drafts: int = 0  # most proposed tokens of a launch, each drawn for beside one token of each row
    copies_blocks: bool = False  # there is a program for the copies of a plan
    has_library: bool = False  # on a CPU: attention by the library in C can be the default
    activation_bits: int = 0  # of products of few bits in the library


@names_checked(ConfigError)
@dataclass(frozen=True)
class SpeculativeConfig:
    """Proposals of next tokens, with the names of vLLM. `None` means "auto".

    Raises:
        ConfigError: a setting is unknown, of the wrong type or out of range, or has no effect on the method.
    """

    method: SpeculativeMethod = "ngram"
    num_speculative_tokens: int = 0  # most proposed tokens of a request in an iteration; at least 1
    prompt_lookup_max: int | None = None  # ngram: the longest n-gram; None: as `prompt_lookup_min`, or 5
    prompt_lookup_min: int | None = None  # ngram: the shortest n-gram; None: as `prompt_lookup_max`, or 5
    model: str | None = None  # draft_model: as `EngineConfig.model`
    disable_by_batch_size: int | None = None  # no proposals in iterations of more requests

    def __post_init__(self) -> None:
        check_values(self)
        for name, bound in (("num_speculative_tokens", MAX_DRAFTS), ("prompt_lookup_max", MAX_NGRAM)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= bound:
                raise _speculative_error(f"{name} must be an integer from 1 to {bound}, got {value}")
        if self.ngrams[0] < 1 or self.ngrams[0] > self.ngrams[1]:
            raise _speculative_error(
                f"prompt_lookup_min must be an integer from 1 to prompt_lookup_max ({self.ngrams[1]}), "
                f"got {self.prompt_lookup_min}"
            )
        if self.disable_by_batch_size is not None and self.disable_by_batch_size < 1:
            raise _speculative_error(f"disable_by_batch_size must be at least 1, got {self.disable_by_batch_size}")
        lookups = self.prompt_lookup_max is not None or self.prompt_lookup_min is not None
        if self.method == "ngram" and self.model is not None:
            raise _speculative_error('model has no effect on method ngram; leave it out, or give "draft_model"')
        if self.method == "draft_model" and lookups:
            raise _speculative_error("prompt_lookup_max and prompt_lookup_min have no effect on method draft_model")
        if self.method == "draft_model" and self.model is None:
            raise _speculative_error("method draft_model needs model: a directory, a name of the Hub, or a preset")

    @property
    def ngrams(self) -> tuple[int, int]:
        """The shortest and the longest n-gram."""
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        least = most if least is None else least
        most = least if most is None else most
        return (DEFAULT_NGRAM if least is None else least), (DEFAULT_NGRAM if most is None else most)


def _speculative_error(message: str) -> ConfigError:
    return ConfigError(f"speculative_config: {message}", param="speculative_config")


def speculative_config(value: object) -> SpeculativeConfig | None:
    """Read the settings of speculation from JSON or a mapping.

    Raises:
        ConfigError: `param` is "speculative_config".
    """
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise _speculative_error(f"{value!r} is not valid JSON; give {_SPECULATIVE_EXAMPLE}") from None
    if not isinstance(value, Mapping):
        raise _speculative_error(f"must be a JSON object such as {_SPECULATIVE_EXAMPLE}, got {value!r}")
    try:
        return SpeculativeConfig(**value)
    except ConfigError as error:
        text = error.message if error.param == "speculative_config" else f"speculative_config: {error.message}"
        raise ConfigError(text, param="speculative_config") from None


@names_checked(ConfigError)
@dataclass(frozen=True)
class EngineConfig:
    """The settings of the user, with the names of vLLM. `None` means "auto"; `assembly/resolve.py` resolves it.

    A setting other than its default is honoured or refused by name (`assembly/support.py`).

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or not one of its choices; `param` names it.
    """

    model: str = "demo"  # or "smollm2", a directory, a name of the Hub ("ORG/NAME"), a GGUF file, or "preset:<name>"
    tokenizer: str | None = None  # directory, tokenizer.json or name of the Hub; None: that of the model
    decoder: str | None = None  # "module:Class" or "file.py:Class" of a decoder of one's own; None: this package's
    load_format: LoadFormat = "auto"
    revision: str | None = None  # of a model of the Hub: branch, tag or commit; None: its default branch
    download_dir: str | None = None  # cache of models of the Hub; None: that of huggingface_hub
    dtype: DType | Literal["auto"] = "auto"
    quantization: QuantizationName | None = None  # of the weights while loading; None: as in config.json
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64  # the paper's max_bs
    max_num_rows: int | None = None  # a policy from outside: requests with pages; None: as many as in iterations
    scheduler: str = "chunked"  # a SchedulerName, or MODULE:CLASS or FILE.py:CLASS of a `policy.Policy`
    scheduler_options: str | None = None  # for such a class: a mapping, or JSON of it
    scheduling_policy: str = "fcfs"  # chunked: an OrderingName, or the class of a `policy.Order`
    length_predictor: str | None = None  # bound (None), quantiles, demo, or the directory of a ranker
    overlap: bool | None = None  # chunked (None: yes): select the next iteration while one runs
    check_in_interval: int = 1  # chunked: iterations submitted ahead of the host, which reads their results together
    enable_prefix_caching: bool | None = None  # chunked (None: yes): reuse pages of prompts with the same beginning
    n_workers: int | None = None  # the paper's n_workers: iterations in flight; None: one for each pipeline stage
    n_slots: int | None = None  # the paper's n_slots: tokens that may be reserved at once
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1  # stages, each with its part of the layers
    page_size: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float | None = None  # accelerators; None: GPU_MEMORY_UTILIZATION
    kv_cache_dtype: KVCacheDType | Literal["auto"] = "auto"
    speculative_config: SpeculativeConfig | None = None  # or a mapping, or JSON; None: no speculation
    max_num_batched_tokens: int | None = None  # in one launch; chunked: in one iteration (None: by measurement)
    itl_target_ms: float | None = None  # chunked: time between tokens for which the budget is measured
    compile_cache: str | None = field(default="auto")
    strict_compile: bool = False
    attention_implementation: AttentionName | None = None
    cpu_products: CpuProducts = "auto"  # on a CPU: products and attention of XLA, or of a library in C
    kernel_self_test: bool = True  # on accelerators: try the attention kernels once before loading
    enable_lora: bool = False  # serve low-rank adapters beside the model
    max_loras: int | None = None  # adapters in one batch; None: MAX_LORAS
    max_lora_rank: int | None = None  # None: MAX_LORA_RANK
    max_cpu_loras: int | None = None  # adapters loaded at once, on the host; None: 4 times max_loras
    lora_modules: tuple[str, ...] = ()  # NAME=PATH of adapters to load at the start
    trace_file: str | None = None  # file for the timeline, which `python -m orca_jax.timeline` shows
    progress: bool = True  # bars on standard error while loading and compiling

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative_config", speculative_config(self.speculative_config))
        options: object = self.scheduler_options
        if isinstance(options, Mapping):
            object.__setattr__(self, "scheduler_options", json.dumps(options))
        check_values(self)
        check_known_or_class(self.scheduler, "scheduler", get_args(SchedulerName))
        check_known_or_class(self.scheduling_policy, "scheduling_policy", get_args(OrderingName))

    @property
    def lora_paths(self) -> dict[str, str]:
        """The paths of `lora_modules` by name. Raises ConfigError."""
        paths: dict[str, str] = {}
        for module in self.lora_modules:
            name, _, path = module.partition("=")
            if not name or not path:
                raise ConfigError(f"lora_modules must be NAME=PATH, got {module!r}", param="lora_modules")
            fault = adapter_name_fault(name)
            if fault is not None:
                raise ConfigError(f"lora_modules: the name {fault}", param="lora_modules")
            if name in paths:
                raise ConfigError(f"lora_modules has the name {name!r} twice; use other names", param="lora_modules")
            paths[name] = path
        return paths
