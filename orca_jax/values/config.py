"""Settings: one small frozen dataclass per layer of the package.

Only `EngineConfig`, the settings of the user, may hold "auto" or None for "auto". `assembly/resolve.py` resolves them
once into the other classes. No setting is read from the environment.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from orca_jax.values.cache_spec import LayerCache, LayerGroup, PageShape
from orca_jax.values.checks import (
    adapter_name_fault,
    check_known_or_class,
    check_values,
    first_line,
    json_value,
    names_checked,
    short,
)
from orca_jax.values.errors import ConfigError
from orca_jax.values.layer_config import (
    PAGED_MIXERS,
    SHARED_MIXERS,
    STATELESS_MIXERS,
    STREAM_PARTS,
    DeltaRuleConfig,
    ExpertsConfig,
    LatentConfig,
    LayerInputs,
    LayerKind,
    MambaConfig,
    MixerName,
    Residual,
    ResidualFactors,
    RopeConfig,
    SharedBlocks,
    ShortConvConfig,
    StoredForm,
    WideConfig,
)
from orca_jax.values.speculation import SpeculativeConfig, speculative_config

DType = Literal["float32", "bfloat16", "float16"]
# of stored keys and values
PageDType = Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
# the same, with vLLM's name for float8
KVCacheDType = Literal["float32", "bfloat16", "float16", "int8", "fp8"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
# the order of tokens in a page, see kernels/kv_pages.py
PageLayout = Literal["head_major", "token_major"]
# see docs/kernels.md
AttentionName = Literal[
    "tpu",
    "tpu_latents",
    "gpu",
    "triton",
    "triton_latents",
    "native",
    "gather",
    "xla",
    "reference",
]
CpuProducts = Literal["auto", "native", "xla"]  # see assembly/products.py
LoadFormat = Literal["auto", "safetensors", "orbax", "dummy"]
Quantization = Literal["int8", "int4", "fp8"]  # of weights, see model/quantise.py
# the last two also quantise activations
QuantizationName = Literal[Quantization, "int8-dynamic", "int4-dynamic"]
MAX_LORAS = 8  # adapters in one batch by default
MAX_LORA_RANK = 16
KV_DISK_GIB = 8  # default size of the pages of a model in `kv_disk`
GPU_MEMORY_UTILIZATION = 0.9  # default share of an accelerator's memory for this process


class Traits(NamedTuple):
    """The abilities of a kind of scheduler."""

    # a request reserves all its slots when it is admitted; else blocks on demand
    has_reservations: bool = False
    shares_prefixes: bool = False  # requests may begin with blocks of the prefix cache
    has_orderings: bool = False  # `--scheduling-policy` decides the order
    has_token_budget: bool = False  # an iteration has at most `--max-num-batched-tokens` tokens
    has_workers: bool = False  # `--n-workers` iterations may be in flight
    has_overlap: bool = False  # `--overlap` selects the next iteration while one runs
    # fields of callers and predictors that it may read, beside those of its ordering
    reads: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Named:
    """A class that a setting names, and its words in the help of the setting."""

    place: str  # MODULE:CLASS; it is imported at its first use
    words: str


@dataclass(frozen=True)
class NamedScheduler(Named):
    """A scheduler that a setting names."""

    traits: Traits


SCHEDULERS: Mapping[str, NamedScheduler] = {
    "orca": NamedScheduler(
        "orca_jax.sched.orca:OrcaScheduler",
        "orca: iteration-level scheduling as in the paper",
        Traits(has_reservations=True, has_workers=True),
    ),
    "chunked": NamedScheduler(
        "orca_jax.sched.chunked:ChunkedScheduler",
        "chunked: the same with a token budget",
        Traits(shares_prefixes=True, has_orderings=True, has_token_budget=True, has_overlap=True),
    ),
    "request_level": NamedScheduler(
        "orca_jax.sched.request_level:RequestLevelScheduler",
        "request_level: the paper's baseline",
        Traits(has_reservations=True, has_workers=True),
    ),
}
"""The values of `EngineConfig.scheduler`, beside a class of a caller; each is a `sched.scheduler.SchedulerKind`."""
ORDERINGS: Mapping[str, Named] = {
    "fcfs": Named("orca_jax.sched.orderings.fcfs:FirstComeFirstServed", "by arrival (fcfs)"),
    "priority": Named("orca_jax.sched.orderings.priority:Priority", "priority"),
    "fair": Named("orca_jax.sched.orderings.fair:FairShare", "fair shares of tenants"),
    "deadline": Named("orca_jax.sched.orderings.deadline:EarliestDeadline", "deadline"),
    "shortest": Named(
        "orca_jax.sched.orderings.shortest:ShortestFirst", "predicted length (shortest)"
    ),
}
"""The values of `EngineConfig.scheduling_policy`, beside a class of a caller."""
PREDICTORS: Mapping[str, Named] = {
    "bound": Named("orca_jax.sched.pool:ClientBound", "bound (a request's max_tokens)"),
    "quantiles": Named("orca_jax.sched.predict:RunningQuantiles", "quantiles (of past requests)"),
}
"""The values of `EngineConfig.length_predictor`, beside a ranker and a class of a caller."""


LRU = "lru"
RETENTIONS: Mapping[str, Named] = {
    LRU: Named("", "least recently used (lru)"),
    "lru-ttl": Named(
        "orca_jax.sched.prefixes.retentions:LruTtl",
        "the same with wishes of calls (lru-ttl)",
    ),
    "cost": Named(
        "orca_jax.sched.prefixes.retentions:Cost",
        "by time and chance of use (cost)",
    ),
}
"""The values of `EngineConfig.retention`, beside a class of a caller. The first one is that of the pools themselves."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Families differ only in these values and in the names of weights."""

    family: str
    vocab_size: int
    layers: tuple[LayerKind, ...]
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int  # of the MLP, or of each expert
    max_positions: int
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    activation: Literal["gelu_tanh", "gelu", "silu", "relu", "relu2", "xielu"]
    gated_mlp: bool
    attention_bias: bool  # of queries, keys and values
    mlp_bias: bool
    tied_embeddings: bool
    learned_positions: bool = False  # a table of them is added to token embeddings
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    attention_out_bias: bool = False
    # of queries and keys: of each head, or of all heads together
    qk_norm: Literal["head", "all"] | None = None
    qk_norm_last: bool = False  # the norms of heads come after their rotation
    value_norm: bool = False  # of each head's values, without weights
    # queries, keys and values are clamped to this distance from zero, after norms and before positions
    attention_clip: float | None = None
    attention_sinks: bool = False  # a score of each head joins the softmax and has no value
    # a positive weight for each head, or for all numbers
    attention_gate: Literal["head", "all"] | None = None
    attention_gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    residual: Residual = "pre_norm"
    residual_factors: ResidualFactors | None = None  # of the residual "normed"
    # factor on what attention and MLP add, of the residuals "pre_norm" and "both_norms"
    residual_scale: float = 1.0
    # the stream after each layer is multiplied by a parameter of one number
    layer_scale: bool = False
    dense_mlp_dim: int = 0  # of the MLP of layers with the MLP dense_mlp
    wide: WideConfig | None = None  # of layers with the mixer wide_attention
    layer_inputs: LayerInputs | None = None  # None: layers have no inputs beside the stream
    shared_blocks: SharedBlocks | None = None  # of the residual "carried"
    # of layers with latent attention, which are then all with pages
    latent: LatentConfig | None = None
    short_conv: ShortConvConfig | None = None  # of layers with this mixer
    delta_rule: DeltaRuleConfig | None = None  # of layers with this mixer
    mamba: MambaConfig | None = None  # likewise
    attention_scale: float | None = None  # factor on scores; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # scores s become cap * tanh(s / cap)
    logit_soft_cap: float | None = None  # likewise for logits
    head_bias: bool = False  # of the unembedding, which is then not the embedding
    logit_scale: float = 1.0  # factor on logits, before their cap
    # factor on token embeddings, rounded in the type of the parameters
    embedding_scale: float = 1.0
    embedding_norm: bool = False  # a norm of token embeddings, before the first layer
    norm_scale: bool = True  # norms have weights
    norm_bias: bool = True  # of norms of the kind layernorm
    norm_offset: float = 0.0  # added to the scales of all norms
    # of linear layers and tables of the vocabulary; None: plain weights
    quantization: Quantization | None = None
    stored: StoredForm | None = None  # of quantised weights in the files; None: plain ones, or ours
    # of each key/value head, counted in `num_kv_heads`; more than 1 only on many devices
    kv_copies: int = 1
    experts: ExpertsConfig | None = None  # None: each layer has one MLP
    # by path, of equal parts of parameters' last axis
    weight_factors: tuple[tuple[str, tuple[float, ...]], ...] = ()
    text_family: str | None = None  # of a model for images and texts: the `model_type` of its texts
    decoder: str | None = None  # "module:Class" of a decoder outside this package, see model/own.py

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary positions of layers without a window, or else of the others; None if no layer has them."""
        windows_last = sorted(self.layers, key=lambda kind: kind.window is not None)
        return next((kind.rope for kind in windows_last if kind.rope is not None), None)

    @property
    def active_mlp_dim(self) -> int:
        """The width of all MLPs that a token goes through in a layer, the widest one."""
        width = self.mlp_dim
        if self.experts is not None:
            width *= self.experts.per_token
            width += self.experts.shared_dim + self.experts.beside_dim
        return max(width, self.dense_mlp_dim)

    @property
    def stream_dim(self) -> int:
        """The numbers of a token between layers."""
        return self.embed_dim * STREAM_PARTS.get(self.residual, 1)

    def of_mixer(self, mixer: str) -> "ModelConfig":
        """The same model, with the sizes of one kind of attention as those of all heads."""
        if self.wide is None or not mixer.startswith("wide_"):
            return self
        sizes = {
            name: getattr(self.wide, name) for name in ("head_dim", "num_kv_heads", "kv_copies")
        }
        sizes["num_heads"] = self.wide.num_heads or self.num_heads
        return replace(self, **sizes)

    @cached_property
    def score_scale(self) -> float:
        """The factor on the products of queries and keys."""
        if self.attention_scale is None:
            return self.head_dim**-0.5
        return self.attention_scale

    def layers_with(self, part: str) -> tuple[int, ...]:
        """The layers with a mixer or an MLP of this name."""
        return tuple(layer for layer, kind in enumerate(self.layers) if part in kind.parts)

    @property
    def mixers(self) -> tuple[MixerName, ...]:
        """The different mixers of the model, in the order of their first layers."""
        return tuple(dict.fromkeys(kind.mixer for kind in self.layers))

    @property
    def shares_keys(self) -> bool:
        """True if some layers read the keys and values of earlier ones."""
        return not SHARED_MIXERS.keys().isdisjoint(self.mixers)

    @property
    def has_states(self) -> bool:
        """True if some layers keep a state of each request in place of pages."""
        return not STATELESS_MIXERS.issuperset(self.mixers)

    @property
    def only_counts_tokens(self) -> bool:
        """True if no layer of the model has attention: pages of the first one count tokens, and nothing writes them."""
        return self.mamba is not None and self.head_dim == 1

    @property
    def page_shape(self) -> PageShape:
        """The shape of the pages of layers with attention, but not of those with wide heads."""
        if self.latent is not None:
            return PageShape(
                self.num_kv_heads, self.latent.rank + self.latent.rotated_dim, has_values=False
            )
        return PageShape(self.num_kv_heads, self.head_dim)

    @cached_property
    def layer_caches(self) -> tuple[LayerCache | None, ...]:
        """The keys and values that each layer keeps; None for layers with a state in their place."""
        found: list[LayerCache | None] = [None] * self.num_layers
        for layer, kind in enumerate(self.layers):
            if kind.mixer in PAGED_MIXERS:
                found[layer] = LayerCache(self.of_mixer(kind.mixer).page_shape, kind.window)
        if self.only_counts_tokens:
            found[0] = LayerCache(self.page_shape)
        return tuple(found)

    def layer_of_pages(self, layer: int) -> int:
        """The layer whose pages a layer reads: itself, or the last earlier one with the same heads."""
        mixer = SHARED_MIXERS.get(self.layers[layer].mixer)
        if mixer is None:
            return layer
        return max(other for other in self.layers_with(mixer) if other < layer)


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
    # most proposed tokens of a launch, each drawn for beside one token of each row
    num_drafts: int = 0
    copies_blocks: bool = False  # there is a program for the copies of a plan
    # there are programs that read and write blocks for tiers of the cache
    moves_blocks: bool = False
    has_library: bool = False  # on a CPU: attention by the library in C can be the default
    activation_bits: int = 0  # of products of few bits in the library
    logprobs_mode: LogprobsMode = "raw_logprobs"


def _json_of(value: object, name: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} has no form as JSON: {first_line(error)}", param=name) from None


def _adapter_of(module: str) -> tuple[str, str]:
    """The name and the path of an entry of `lora_modules`: NAME=PATH, or an object of JSON as in vLLM.

    Raises:
        ConfigError: the entry has another form; `param` is "lora_modules".
    """
    form = 'NAME=PATH, or {"name": NAME, "path": PATH}'
    if not module.startswith("{"):
        name, _, path = module.partition("=")
        if not name or not path:
            raise ConfigError(f"lora_modules must be {form}; got {module!r}", param="lora_modules")
        return name, path
    try:
        found = json_value(module)
    except ValueError:
        raise ConfigError(
            f"lora_modules: {short(module)} is not valid JSON; give {form}", "lora_modules"
        ) from None
    # the served model is the base of each
    others = found.keys() - {"name", "path", "base_model_name"}
    if others:
        raise ConfigError(
            f"lora_modules: {min(others)!r} is unknown; give {form}", param="lora_modules"
        )
    name = found.get("name")
    path = found.get("path")
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise ConfigError(f"lora_modules must be {form}; got {short(module)}", param="lora_modules")
    return name, path


@names_checked(ConfigError)
@dataclass(frozen=True)
class EngineConfig:
    """The settings of the user, with the names of vLLM. `None` means "auto"; `assembly/resolve.py` resolves it.

    `flags/texts.toml` says what each setting means, and what its default stands for. One in JSON may be a mapping.
    A setting other than its default is honoured or refused by name (`assembly/support.py`).

    Raises:
        ConfigError: a setting is unknown, of the wrong type, or not one of its choices; `param` names it.
    """

    model: str = "demo"
    tokenizer: str | None = None
    decoder: str | None = None
    load_format: LoadFormat = "auto"
    revision: str | None = None
    download_dir: str | None = None
    hf_token: str | None = field(default=None, repr=False)
    dtype: DType | Literal["auto"] = "auto"
    quantization: QuantizationName | None = None
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_rows: int | None = None
    scheduler: str = "chunked"
    scheduler_options: str | None = None
    scheduling_policy: str = "fcfs"
    length_predictor: str | None = None
    overlap: bool | None = None
    check_in_interval: int = 1
    enable_prefix_caching: bool | None = None
    retention: str = LRU
    n_workers: int | None = None
    n_slots: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int = 1
    page_size: int | None = None
    num_pages: int | None = None
    kv_host_memory: int | None = None
    kv_disk: str | None = None
    kv_disk_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: KVCacheDType | Literal["auto"] = "auto"
    logprobs_mode: LogprobsMode = "raw_logprobs"
    speculative_config: SpeculativeConfig | None = None
    max_num_batched_tokens: int | None = None
    itl_target_ms: float | None = None
    compile_cache: str | None = "auto"
    strict_compile: bool = False
    attention_implementation: AttentionName | None = None
    cpu_products: CpuProducts = "auto"
    kernel_self_test: bool = True
    enable_lora: bool = False
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    lora_modules: tuple[str, ...] = ()
    trace_file: str | None = None
    progress: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative_config", speculative_config(self.speculative_config))
        options: object = self.scheduler_options
        if isinstance(options, Mapping):
            object.__setattr__(self, "scheduler_options", _json_of(options, "scheduler_options"))
        check_values(self)
        check_known_or_class(self.scheduler, "scheduler", tuple(SCHEDULERS))
        check_known_or_class(self.scheduling_policy, "scheduling_policy", tuple(ORDERINGS))
        check_known_or_class(self.retention, "retention", tuple(RETENTIONS))

    @property
    def lora_paths(self) -> dict[str, str]:
        """The paths of `lora_modules` by name. Raises ConfigError."""
        paths: dict[str, str] = {}
        for module in self.lora_modules:
            name, path = _adapter_of(module)
            fault = adapter_name_fault(name)
            if fault is not None:
                raise ConfigError(f"lora_modules: the name {fault}", param="lora_modules")
            if name in paths:
                raise ConfigError(
                    f"lora_modules has the name {name!r} twice; use other names",
                    param="lora_modules",
                )
            paths[name] = path
        return paths
