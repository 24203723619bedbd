"""The settings of an executor, from the settings of the user and the devices. Every "auto" is resolved here."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orca_jax.assembly.choices import Choices
from orca_jax.helpers.cache_files import own_folder, refusal
from orca_jax.helpers.processor import multiplies_bfloat16
from orca_jax.sched.states import SNAPSHOT_TOKENS
from orca_jax.values.cache_spec import form_groups
from orca_jax.values.config import (
    AttentionName,
    CacheConfig,
    DType,
    ExecutorConfig,
    LoraConfig,
    ModelConfig,
    PageDType,
    page_dtype,
)
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_named

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from orca_jax.assembly.executor import PlacedModel, PlacedStage

logger = logging.getLogger(__name__)


def dtype_of(wanted: DType | Literal["auto"], platform: str) -> DType:
    """Return the type of weights and activations."""
    return platform_named(platform).dtype if wanted == "auto" else wanted


def cache_directory(directory: str | None) -> str | None:
    """Return the folder of compiled programs within the directory of the settings; None: programs are not kept.

    The log has a warning if other users could write machine code into the folder.
    """
    if directory == "auto":
        try:
            directory = str(Path.home() / ".cache" / "orca-jax" / "programs")
        # no HOME, and a user without an entry in the table of users, as in some containers
        except RuntimeError:
            logger.warning(
                "there is no home directory for the compile cache, so programs are compiled at each start"
            )
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
    choices: Choices,
    max_model_len: int,
    placed: "PlacedModel",
    attention: AttentionName | None = None,
    free: int | None = None,
    directory: str | None = None,
    *,
    strict_compile: bool = False,
) -> ExecutorConfig:
    """Choose shapes. The size of the cache follows from the memory that the model leaves on its devices.

    Args:
        choices: the choices of the settings.
        max_model_len: most tokens of one request.
        placed: the model on its devices.
        attention: the wanted implementation; None for the default of the devices.
        free: bytes free on each device before loading; None measures them, if all devices are of this process.
        directory: the directory of compiled programs, from `cache_directory`.
        strict_compile: see `ExecutorConfig`.

    Raises:
        ConfigError: the memory is too small; `param` names a setting.
    """
    buckets = choices.budget.sizes(placed.platform.name, skips_padding=placed.skips_padding)
    return ExecutorConfig(
        dtype=placed.weights.dtype,
        tensor_parallel_size=len(placed.devices) // len(placed.stages),
        buckets=buckets,
        num_rows=choices.requests.num_rows,
        max_model_len=max_model_len,
        cache=_cache(choices, placed.config, max_model_len, placed, buckets[-1], free),
        attention_implementation=attention,
        has_library=placed.library is not None,
        activation_bits=0 if placed.library is None else placed.library.activation_bits,
        compile_cache=directory,
        strict_compile=strict_compile,
        pipeline_parallel_size=len(placed.stages),
        lora=choices.lora,
        num_drafts=choices.most_drafts,
        copies_blocks=choices.traits.shares_prefixes,
        moves_blocks=choices.pages.tiers.are_used,
        logprobs_mode=choices.requests.logprobs_mode,
    )


def page_type(dtype: DType, *, converts: bool, has_bfloat16: bool) -> PageDType:
    """Return the type of pages for a `kv_cache_dtype` of "auto".

    Args:
        dtype: the type of weights and activations.
        converts: True if attention converts other types than float32 in each product.
        has_bfloat16: True to keep bfloat16 on a CPU. A CPU converts other types than float32 in each product of
            attention, so their pages are float32.
    """
    if not converts or (dtype == "bfloat16" and has_bfloat16):
        return dtype
    return "float32"


def can_view(dtype: PageDType, *, has_tiles: bool) -> bool:
    """Return True if pages can be viewed in another shape without a copy: on TPUs they are stored in tiles of theirs.

    The scales of 8-bit pages belong to heads.
    """
    return not has_tiles and dtype not in ("int8", "float8_e4m3fn")


def _cache(
    choices: Choices,
    model: ModelConfig,
    max_model_len: int,
    placed: "PlacedModel",
    largest: int,
    free: int | None,
) -> CacheConfig:
    """Choose type, layout and size of the KV cache; `largest` is the largest launch in tokens."""
    from orca_jax.exec.cache import (
        SHARED,
        WHOLE,
        free_memory,
        largest_stack,
        size_cache,
        weight_bytes,
        with_num_pages,
        workspace_bytes,
    )
    from orca_jax.exec.states import state_demand

    requests = choices.requests
    pages = choices.pages
    dtype = placed.weights.dtype
    cache_auto = page_type(
        dtype, converts=placed.platform.converts_pages, has_bfloat16=multiplies_bfloat16()
    )
    cache_dtype = cache_auto if pages.dtype == "auto" else page_dtype(pages.dtype)
    groups = form_groups(
        model.layer_caches,
        max_model_len,
        views=can_view(cache_dtype, has_tiles=placed.platform.has_tiles),
    )
    form = CacheConfig(groups, (), pages.size, cache_dtype, placed.platform.page_layout)
    snapshots = 0
    if requests.reuses_prefixes:
        snapshots = most_snapshots(max_model_len)
    states = state_demand(model, dtype, requests.num_rows, snapshots)
    if pages.number is not None:
        return with_num_pages(form, pages.number, max_model_len, states)
    needed = max(
        weight_bytes(stage.shapes) + _lora_bytes(choices.lora, stage, dtype)
        for stage in placed.stages
    )
    needed += workspace_bytes(
        model, largest, requests.num_rows, max_model_len, placed.mesh.size, choices.most_drafts
    )
    if placed.weights.is_random and not placed.platform.is_host:
        needed += max(largest_stack(stage.shapes) for stage in placed.stages)
    longest = max_model_len
    if choices.traits.has_token_budget:
        longest = min(largest, longest)
    memory = free_memory(placed.devices, choices.devices.utilization, needed, free)
    return size_cache(
        form,
        [stage.shapes.span for stage in placed.stages],
        memory=memory // len(placed.stages),
        num_rows=requests.num_rows,
        max_model_len=max_model_len,
        longest=longest,
        states=states,
        use=SHARED if placed.platform.is_host else WHOLE,
    )


def most_snapshots(max_model_len: int) -> int:
    """Return the most snapshots of states of one request: at borders, before its answer, and at its end."""
    return max_model_len // SNAPSHOT_TOKENS + 2


def _lora_bytes(lora: LoraConfig | None, stage: "PlacedStage", dtype: DType) -> int:
    """Bytes of the adapters of a stage on each of its devices."""
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
        raise ConfigError(
            f"{error}; leave attention_implementation out", param="attention_implementation"
        ) from None
    level = logging.WARNING if choice.is_slow else logging.INFO
    slowly = ". It is slower than the kernels named here" if choice.is_slow else ""
    logger.log(level, "attention by %r: %s%s", choice.backend.name, choice.reason, slowly)
    return choice.backend.name
