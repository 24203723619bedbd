"""The settings of an executor, from the settings of the user and the devices. Every "auto" is resolved here."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from orca_jax.assembly.budget import launch_sizes
from orca_jax.assembly.scheduler import num_rows
from orca_jax.assembly.settings import num_loras, reuses_prefixes, traits_of
from orca_jax.assembly.speculation import most_drafts
from orca_jax.bundled import is_preset
from orca_jax.cache_files import own_folder, refusal
from orca_jax.cache_spec import form_groups
from orca_jax.config import (
    GPU_MEMORY_UTILIZATION,
    MAX_LORA_RANK,
    AttentionName,
    CacheConfig,
    DType,
    EngineConfig,
    ExecutorConfig,
    LoraConfig,
    ModelConfig,
    PageDType,
    PageLayout,
    page_dtype,
)
from orca_jax.errors import ConfigError
from orca_jax.processor import multiplies_bfloat16
from orca_jax.sched.states import SNAPSHOT_TOKENS
from orca_jax.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from orca_jax.assembly.executor import PlacedModel, PlacedStage

logger = logging.getLogger(__name__)

PAGE_SIZE = 128  # tokens; the fastest size measured on a CPU, and large enough to keep page tables short


def dtype_of(config: EngineConfig, platform: str) -> DType:
    """Return the type of weights and activations."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if platform == "cpu" else "bfloat16"


def max_model_len_of(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most tokens of one request."""
    return config.max_model_len or model.max_positions


def tokenizer_of(config: EngineConfig, source: str) -> Tokenizer:
    """Return the tokenizer of the settings, or without one the tokenizer of the model.

    Args:
        config: the settings.
        source: the directory of the model, or its preset. A preset has the byte tokenizer.

    Raises:
        ConfigError: the tokenizer is missing or cannot be used; `param` is "tokenizer".
    """
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    return ByteTokenizer() if is_preset(source) else load_tokenizer(source)


def cache_directory(directory: str | None) -> str | None:
    """Return the folder of compiled programs within the directory of the settings; None: programs are not kept.

    The log has a warning if other users could write machine code into the folder.
    """
    if directory == "auto":
        try:
            directory = str(Path.home() / ".cache" / "orca-jax" / "programs")
        except RuntimeError:  # no HOME, and a user without an entry in the table of users, as in some containers
            logger.warning("there is no home directory for the compile cache, so programs are compiled at each start")
            return None
    if directory is None:
        return None
    folder = own_folder(directory)
    reason = refusal(folder)
    if not reason:
        return str(folder)
    logger.warning(
        "the compile cache %s is not used, so programs are compiled at each start: %s; change its owner or its mode "
        "(chown, chmod go-w), or give another directory as compile_cache",
        folder,
        reason,
    )
    return None


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    max_model_len: int,
    placed: "PlacedModel",
    free: int | None = None,
    directory: str | None = None,
) -> ExecutorConfig:
    """Choose shapes. The size of the cache follows from the memory that the model leaves on its devices.

    Args:
        config: the settings.
        model: the model.
        max_model_len: most tokens of one request.
        placed: the model on its devices.
        free: bytes free on each device before loading; None measures them, if all devices are of this process.
        directory: the directory of compiled programs, from `cache_directory`.

    Raises:
        ConfigError: the memory is too small; `param` names a setting.
    """
    platform = placed.platform
    dtype = dtype_of(config, platform)
    buckets = launch_sizes(config, platform)
    rows = num_rows(config)
    return ExecutorConfig(
        dtype=dtype,
        tensor_parallel_size=len(placed.devices) // len(placed.stages),
        buckets=buckets,
        num_rows=rows,
        max_model_len=max_model_len,
        cache=_cache(config, model, max_model_len, placed, buckets[-1], free),
        attention_implementation=attention_of(config, placed),
        compile_cache=directory,
        strict_compile=config.strict_compile,
        pipeline_parallel_size=len(placed.stages),
        lora=_lora(config),
        num_drafts=most_drafts(config),
        copies_blocks=reuses_prefixes(config),
    )


def attention_of(config: EngineConfig, placed: "PlacedModel") -> AttentionName | None:
    """Return the implementation of attention; None for the default of the devices.

    The default of a CPU is the library of products, which another engine of this process may have loaded.
    """
    is_plain = placed.platform == "cpu" and placed.library is None
    return config.attention_implementation or ("xla" if is_plain else None)


def page_type(dtype: DType, platform: str, *, has_bfloat16: bool) -> PageDType:
    """Return the type of pages for a `kv_cache_dtype` of "auto".

    Args:
        dtype: the type of weights and activations.
        platform: the platform of the devices.
        has_bfloat16: True to keep bfloat16 on a CPU. A CPU converts other types than float32 in each product of
            attention, so their pages are float32.
    """
    if platform != "cpu" or (dtype == "bfloat16" and has_bfloat16):
        return dtype
    return "float32"


def page_layout(platform: str) -> PageLayout:
    """Return the order of tokens in a page."""
    return "head_major" if platform == "cpu" else "packed"


def can_view(platform: str, dtype: PageDType) -> bool:
    """Return True if pages can be viewed in another shape without a copy: on TPUs they are stored in tiles of theirs.

    The scales of 8-bit pages belong to heads.
    """
    return platform != "tpu" and dtype not in ("int8", "float8_e4m3fn")


def _lora(config: EngineConfig) -> LoraConfig | None:
    if not config.enable_lora:
        return None
    return LoraConfig(num_loras(config), config.max_lora_rank or MAX_LORA_RANK)


def _cache(
    config: EngineConfig, model: ModelConfig, max_model_len: int, placed: "PlacedModel", largest: int, free: int | None
) -> CacheConfig:
    """Choose type, layout and size of the KV cache; `largest` is the largest launch in tokens."""
    from orca_jax.exec.cache import (
        free_memory,
        largest_stack,
        size_cache,
        weight_bytes,
        with_num_pages,
        workspace_bytes,
    )
    from orca_jax.exec.states import state_demand

    dtype = dtype_of(config, placed.platform)
    cache_auto = page_type(dtype, placed.platform, has_bfloat16=multiplies_bfloat16())
    cache_dtype = cache_auto if config.kv_cache_dtype == "auto" else page_dtype(config.kv_cache_dtype)
    groups = form_groups(model.layer_caches, max_model_len, views=can_view(placed.platform, cache_dtype))
    form = CacheConfig(groups, (), config.page_size or PAGE_SIZE, cache_dtype, page_layout(placed.platform))
    rows = num_rows(config)
    states = state_demand(model, dtype, rows, most_snapshots(config, max_model_len))
    if config.num_pages is not None:
        return with_num_pages(form, config.num_pages, max_model_len, states)
    needed = max(weight_bytes(stage.shapes) + _lora_bytes(config, stage, dtype) for stage in placed.stages)
    needed += workspace_bytes(model, largest, rows, max_model_len, placed.mesh.size, most_drafts(config))
    if placed.weights.is_random and placed.platform != "cpu":
        needed += max(largest_stack(stage.shapes) for stage in placed.stages)
    utilization = config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION
    memory = free_memory(placed.devices, utilization, needed, free)
    return size_cache(
        form,
        [stage.shapes.span for stage in placed.stages],
        memory=memory // len(placed.stages),
        num_rows=rows,
        max_model_len=max_model_len,
        longest=longest_member(config, largest, max_model_len),
        states=states,
    )


def most_snapshots(config: EngineConfig, max_model_len: int) -> int:
    """Return the most snapshots of states of one request: at borders, before its answer, and at its end."""
    return max_model_len // SNAPSHOT_TOKENS + 2 if reuses_prefixes(config) else 0


def longest_member(config: EngineConfig, largest: int, max_model_len: int) -> int:
    """Return the most tokens of a request in one iteration, with launches of up to `largest` tokens."""
    return min(largest, max_model_len) if traits_of(config).has_token_budget else max_model_len


def _lora_bytes(config: EngineConfig, stage: "PlacedStage", dtype: DType) -> int:
    """Bytes of the adapters of a stage on each of its devices."""
    lora = _lora(config)
    if lora is None:
        return 0
    from orca_jax.model.lora.stacks import stack_bytes
    from orca_jax.model.stages import of_span

    shapes = stage.shapes
    return stack_bytes(of_span(shapes.config, shapes.span), lora, dtype, stage.mesh)


def explain(model: ModelConfig, config: ExecutorConfig, mesh: "Mesh") -> str:
    """Return the implementation of attention. Log the reason; warn if the device has a faster one for other settings.

    Raises:
        ConfigError: the configured implementation cannot do these shapes on this device.
    """
    from orca_jax.exec.layers import explain_attention

    try:
        choice = explain_attention(model, config, mesh)
    except NotImplementedError as error:
        raise ConfigError(f"{error}; leave attention_implementation out", param="attention_implementation") from None
    level = logging.WARNING if choice.is_slow else logging.INFO
    slowly = ". It is slower than the kernels named here" if choice.is_slow else ""
    logger.log(level, "attention by %r: %s%s", choice.backend.name, choice.reason, slowly)
    return choice.backend.name
