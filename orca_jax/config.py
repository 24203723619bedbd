"""Settings, one small frozen dataclass for each floor.

"auto" may appear only in `EngineConfig`, which holds what the user said. `build.py` resolves it once
into the other values, which hold what is so. Nothing reads the environment.
"""

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]
SchedulerName = Literal["orca", "request_level", "chunked"]
OrderingName = Literal["fcfs", "priority", "fair", "deadline", "shortest"]
PageLayout = Literal["head_major", "packed"]  # how tokens stand in a page, see kernels/kv_pages.py
LoadFormat = Literal["auto", "safetensors", "orbax", "dummy"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. `kind` names the scaling as Hugging Face's `rope_type` does."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"] = "default"
    factor: float = 1.0
    original_max_position: int = 0  # positions seen before scaling; 0 where the kind needs none
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: None derives it from `factor`
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, one for each frequency, up to `original_max_position`


@dataclass(frozen=True)
class ModelConfig:
    """What one pre-norm decoder needs to know; GPT-2 and Llama differ only here and in weight names."""

    family: str
    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_positions: int
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    activation: Literal["gelu_tanh", "gelu", "silu", "relu"]
    gated_mlp: bool
    attention_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    rope: RopeConfig | None = None  # None: learned positions
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def padded_vocab_multiple(self) -> int:
        """The vocabulary is padded to a multiple of this and of the mesh, for aligned matrix products."""
        return 128


@dataclass(frozen=True)
class CacheConfig:
    """K/V memory: `num_pages` pages of `page_size` slots; a slot is K and V of one token in all layers."""

    num_pages: int
    page_size: int
    dtype: DType
    layout: PageLayout = "head_major"

    @property
    def num_slots(self) -> int:
        """Tokens whose K and V fit."""
        return self.num_pages * self.page_size


@dataclass(frozen=True)
class ExecutorConfig:
    """Shapes and devices of the computing floor."""

    dtype: DType
    tensor_parallel_size: int
    buckets: tuple[int, ...]  # ascending padded token counts T, each compiled at start
    num_rows: int
    max_model_len: int
    cache: CacheConfig
    attention_implementation: str | None = None  # None: the backend's default
    compile_cache: str | None = None  # directory; None: no persistent cache
    strict_compile: bool = False  # a compile while serving raises
    max_steps: int = 1  # repetitions of an iteration that one dispatch may make, tokens that a row may keep


@dataclass(frozen=True)
class EngineConfig:
    """What a user may say, with vLLM's names. `None` means "auto" and is resolved in `build.py`."""

    model: str = "demo"  # "demo", a directory, or "preset:<name>"
    tokenizer: str | None = None  # directory or tokenizer.json; None: the model's own
    load_format: LoadFormat = "auto"
    dtype: DType | Literal["auto"] = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64  # the paper's max_bs
    scheduler: SchedulerName = "chunked"
    scheduling_policy: OrderingName = "fcfs"  # chunked: who comes first
    length_predictor: str = "bound"  # how long a request will run: bound, quantiles, demo, or a ranker's directory
    overlap: bool = True  # chunked: select the next iteration while one runs
    check_in_intervals: tuple[int, ...] | None = None  # chunked: iterations between looks at medium, at long requests
    enable_prefix_caching: bool = True  # chunked: begin with pages of requests whose prompts begin alike
    n_workers: int = 1  # the paper's n_workers: iterations in flight
    n_slots: int | None = None  # the paper's n_slots: tokens that may be reserved at once
    tensor_parallel_size: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: DType | Literal["auto"] = "auto"
    max_num_batched_tokens: int | None = None  # in one launch; chunked: in one iteration
    compile_cache: str | None = field(default="auto")
    strict_compile: bool = False
    attention_implementation: str | None = None
    trace_file: str | None = None  # where every arrival, iteration and end is written down, for `orca_jax.timeline`
    progress: bool = True  # bars on standard error while loading and compiling
