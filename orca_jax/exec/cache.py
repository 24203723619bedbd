"""The KV cache: the number of pages for a given memory, and the pages themselves, sharded over heads."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.exec import host
from orca_jax.exec.buckets import sampler_width
from orca_jax.exec.memory import usable_bytes
from orca_jax.exec.states import (
    Caches,
    PagePools,
    StateDemand,
    layer_bytes,
    state_shapes,
    state_specs,
)
from orca_jax.exec.untouched import untouched
from orca_jax.kernels.kv_pages import KVPages, pages_shape, pages_spec
from orca_jax.model.parameters import path_of, split_layer
from orca_jax.model.sharding import MESH_AXES, padded_vocab
from orca_jax.model.stages import LayerSpan
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import LayerGroup, ceil_div, of_stage, pool_shape, sums_by_pool
from orca_jax.values.config import CacheConfig, ExecutorConfig, ModelConfig, PageDType, PageLayout
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_of

SNAPSHOT_SHARE = 0.1  # of the memory beside the fewest blocks, for snapshots of states
NO_STATES = StateDemand()
# of the free memory, within the limits of control groups; other programs need the rest
CPU_SHARE = 0.5


class MemoryUse(NamedTuple):
    """How far a cache fills the memory that it may have.

    Attributes:
        share: the share beyond which the cache has no more than the fewest blocks.
        bits: significant bits of the number of blocks.
    """

    share: float
    bits: int


WHOLE = MemoryUse(1.0, 4)
"""The use of an accelerator's memory."""
SHARED = MemoryUse(0.5, 2)
"""The use of a CPU's memory: other programs take and free much of it."""


def page_bytes(
    model: ModelConfig, page_size: int, dtype: PageDType, layout: PageLayout = "head_major"
) -> int:
    """Bytes of one page in all layers, on all devices together, with its scales."""
    heads = model.num_kv_heads
    head_dim = model.head_dim
    pages = pages_shape(layout, model.num_layers, heads, head_dim, page_size, jnp.dtype(dtype))
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(pages))


def cache_spec(cache: CacheConfig) -> PagePools:
    """Partition of the pages over the mesh: by heads."""
    of_pool = partial(pages_spec, cache.layout, MESH_AXES["kv_heads"], jnp.dtype(cache.dtype))
    pools = range(len(cache.num_blocks))
    return tuple(of_pool(has_values=pool_shape(cache.groups, pool).has_values) for pool in pools)


def cache_shape(cache: CacheConfig) -> PagePools:
    """Shapes of the pages of each pool; no memory is allocated. Pages have the largest shape of their pool."""
    stored = [pool_shape(cache.groups, pool) for pool in range(len(cache.num_blocks))]
    kinds = {(group.pool, group.shape): group for group in cache.groups}
    return tuple(group_shape(cache, kinds[each]) for each in enumerate(stored))


def group_shape(cache: CacheConfig, group: LayerGroup) -> KVPages:
    """Shapes of the pages of a pool, as the layers of a group see them."""
    return _pages_of(cache, group, group.pages_per_block * cache.num_blocks[group.pool])


def _pages_of(cache: CacheConfig, group: LayerGroup, num_pages: int) -> KVPages:
    heads, head_dim, has_values = group.shape
    dtype = jnp.dtype(cache.dtype)
    return pages_shape(
        cache.layout, num_pages, heads, head_dim, cache.page_size, dtype, has_values=has_values
    )


def caches_shape(config: ExecutorConfig, model: ModelConfig) -> Caches:
    """Shapes of the pages and the states of a stage."""
    return Caches(
        cache_shape(config.cache), state_shapes(model, config.cache.num_states, config.dtype)
    )


def caches_spec(config: ExecutorConfig, model: ModelConfig) -> Caches:
    """Partition of the pages and the states of a stage over its mesh."""
    return Caches(cache_spec(config.cache), state_specs(model))


def free_memory(
    devices: Sequence[jax.Device], utilization: float, needed: int, free: int | None = None
) -> int:
    """Bytes available to the cache on all devices together.

    Args:
        devices: the devices of the mesh, before the weights are loaded.
        utilization: share of an accelerator's whole memory for this process in all.
        needed: bytes of weights and workspace on one device.
        free: bytes free on one device; None measures them, if all devices are of this process.
    """
    if free is None:
        free = free_bytes(devices, utilization)
    share = CPU_SHARE if platform_of(devices[0]).is_host else 1
    return int((free - needed) * len(devices) * share)


def free_bytes(devices: Sequence[jax.Device], utilization: float) -> int:
    """Bytes of memory that each of these devices of this process has for weights, workspace and cache."""
    platform = platform_of(devices[0])
    if platform.is_host:
        return host.free_memory() // len(devices)
    stats = [device.memory_stats() for device in devices]
    return min(usable_bytes(each, platform, utilization) - each["bytes_in_use"] for each in stats)


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the parameters on each device; the decoder may hold sharded shapes in their place."""
    leaves = jax.tree.leaves(nnx.state(decoder))
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves
    )


def largest_stack(decoder: Decoder) -> int:
    """Bytes on each device of the largest parameter with all its layers, if the layers have their own arrays.

    Random weights exist as these stacks first. Freed stacks leave holes of this size in all, and one array does not fit
    into several holes. The decoder may hold sharded shapes.
    """
    sizes: dict[str, int] = {}
    for keys, variable in nnx.to_flat_state(nnx.state(decoder)):
        name, layer = split_layer(path_of(keys))
        if layer is not None:
            leaf = variable.get_value()
            sizes[name] = (
                sizes.get(name, 0)
                + math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            )
    return max(sizes.values(), default=0)


def fewest_blocks(
    groups: Sequence[LayerGroup], *, page_size: int, num_rows: int, max_model_len: int, longest: int
) -> tuple[int, ...]:
    """Blocks of each pool for one request of full length, beside a partly filled block of each row in each group.

    Args:
        groups: the groups of the whole model.
        page_size: tokens of a page.
        num_rows: running requests.
        max_model_len: most tokens of a request.
        longest: most tokens of a request in one iteration.
    """
    needed = [group.most_blocks(max_model_len, longest, page_size) + num_rows for group in groups]
    return sums_by_pool(groups, needed)


def stage_bytes(cache: CacheConfig, span: LayerSpan, states: StateDemand = NO_STATES) -> int:
    """Bytes of the pages of a pipeline stage with their scales, and of its states, on all its devices together."""
    sizes = _block_bytes(cache, span)
    pages = sum(number * size for number, size in zip(cache.num_blocks, sizes, strict=True))
    return pages + cache.num_states * states.block_bytes(span)


def size_cache(
    form: CacheConfig,
    spans: Sequence[LayerSpan],
    *,
    memory: int,
    num_rows: int,
    max_model_len: int,
    longest: int,
    states: StateDemand = NO_STATES,
    use: MemoryUse = WHOLE,
) -> CacheConfig:
    """Size the cache to as many blocks as fit in `memory`, but no more than all rows at full length can use.

    The stage with the most bytes decides, as every block has a part in each stage. Several pools share the memory in
    the ratio in which a request of half of `max_model_len` uses them. Beside the fewest blocks of states, snapshots
    have at most `SNAPSHOT_SHARE` of the rest.

    Args:
        form: groups, page size, type and layout; its numbers of blocks are not read.
        spans: the ranges of the layers of each pipeline stage.
        memory: bytes on all devices of a stage together.
        num_rows: running requests.
        max_model_len: most tokens of a request.
        longest: most tokens of a request in one iteration.
        states: the blocks of states that the model needs.
        use: how far the cache fills `memory`.

    Raises:
        ConfigError: not even the fewest blocks fit.
    """
    groups = form.groups
    page_size = form.page_size
    least = replace(
        form,
        num_blocks=fewest_blocks(
            groups,
            page_size=page_size,
            num_rows=num_rows,
            max_model_len=max_model_len,
            longest=longest,
        ),
        num_states=states.fewest,
    )
    needed = max(stage_bytes(least, span, states) for span in spans)
    if memory < needed:
        raise ConfigError(
            f"{memory / 2**30:.2f} GiB are free for the KV cache, but one request of "
            f"max_model_len={max_model_len} beside {num_rows} rows needs {needed / 2**30:.2f} GiB; lower "
            f"max_model_len, max_num_seqs or page_size, or on an accelerator raise gpu_memory_utilization",
            param="max_model_len",
        )
    memory = max(needed, int(use.share * memory))
    # Every row at full length, and the parts of pages left unused by reservations (see KVManager).
    full = ceil_div(num_rows * (max_model_len + page_size - 1), page_size)
    most = []
    for group in groups:
        of_row = group.most_blocks(max_model_len, longest, page_size)
        most.append(num_rows * of_row if group.window else full)
    block = max(states.block_bytes(span) for span in spans)
    num_snapshots = _num_snapshots(states, memory - needed, block)
    needed += num_snapshots * block
    middle = _usual_blocks(form, max_model_len)
    request = max(stage_bytes(replace(least, num_blocks=middle), span) for span in spans)
    number = []
    for few, useful, share in zip(
        least.num_blocks, sums_by_pool(groups, most), middle, strict=True
    ):
        fitting = few + (memory - needed) * share // request
        if fitting < useful:
            useful = max(_rounded(fitting, use.bits), few)
        number.append(useful)
    return replace(least, num_blocks=tuple(number), num_states=states.fewest + num_snapshots)


def _num_snapshots(states: StateDemand, room: int, block: int) -> int:
    """Blocks beyond the fewest ones, of `block` bytes each, where `room` bytes are left for them and for pages."""
    if not block:
        return 0
    fitting = _rounded(int(SNAPSHOT_SHARE * room) // block, WHOLE.bits)
    return min(states.most - states.fewest, fitting)


def with_num_pages(
    form: CacheConfig, num_pages: int, max_model_len: int, states: StateDemand = NO_STATES
) -> CacheConfig:
    """The cache with this number of blocks in its first pool, and in the others as many as `size_cache` chooses.

    Snapshots of states have at most `SNAPSHOT_SHARE` of the bytes of pages in addition.
    """
    usual = _usual_blocks(form, max_model_len)
    cache = replace(
        form, num_blocks=tuple(ceil_div(num_pages * number, usual[0]) for number in usual)
    )
    if not states.layers:
        return replace(cache, num_states=states.fewest)
    span = LayerSpan(0, len(states.layers), len(states.layers))
    snapshots = _num_snapshots(states, stage_bytes(cache, span), states.block_bytes(span))
    return replace(cache, num_states=states.fewest + snapshots)


def _usual_blocks(form: CacheConfig, max_model_len: int) -> tuple[int, ...]:
    """Blocks of each pool for a request of half of `max_model_len` that generates."""
    length = ceil_div(max_model_len, 2)
    return sums_by_pool(
        form.groups, [group.most_blocks(length, 1, form.page_size) for group in form.groups]
    )


def _block_bytes(cache: CacheConfig, span: LayerSpan) -> list[int]:
    """Bytes of a block of each pool in a stage."""
    sizes = [0] * len(cache.num_blocks)
    for group in of_stage(cache.groups, span.start, span.stop):
        page = _pages_of(cache, group, group.pages_per_block)
        size = sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(page))
        sizes[group.pool] = max(sizes[group.pool], size)
    return sizes


def _rounded(number: int, bits: int) -> int:
    """Round down to so many significant bits: free memory varies, and another number of pages needs other programs."""
    step = 1 << max(0, number.bit_length() - bits)
    return number // step * step


def allocate_caches(config: ExecutorConfig, model: ModelConfig, mesh: Mesh) -> Caches:
    """Allocate the pages and the states of a stage. Only what was written is read, so their values have no meaning."""
    shapes = caches_shape(config, model)
    sharding = jax.tree.map(lambda spec: NamedSharding(mesh, spec), caches_spec(config, model))
    if platform_of(mesh.devices.flat[0]).is_host:
        untouched_caches: Caches = jax.tree.map(untouched, shapes, sharding)
        return untouched_caches
    create = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.empty(x.shape, x.dtype), shapes), out_shardings=sharding
    )
    caches: Caches = create()
    return caches


def allocate_zeros[T](shapes: T, mesh: Mesh) -> T:
    """Allocate a tree of arrays on every device. The host holds none of them."""
    create = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    zeros: T = create()
    return zeros


def workspace_bytes(
    model: ModelConfig,
    num_tokens: int,
    num_rows: int,
    max_model_len: int,
    shards: int = 1,
    num_drafts: int = 0,
) -> int:
    """An upper estimate of the memory of programs beside weights and cache, in bytes on one of `shards` devices.

    It includes one layer's float32 activations, the history of all rows, and the full sampler's copies of the device's
    logits: original and changed ones, counts of tokens, and the ordered ones of a draw. With experts it includes copies
    of each token for each of its experts, and a copy of the weights of one expert; with states those of all rows in one
    layer, before and after.
    """
    embed = model.embed_dim
    experts = model.experts
    width = 3 * model.active_mlp_dim
    if experts is not None:
        width += 4 * experts.per_token * embed
    activations = (
        4 * num_tokens * (8 * embed + width + 4 * model.num_heads * model.page_shape.head_dim)
    )
    if experts is not None:
        activations += 4 * 3 * embed * model.mlp_dim // shards
    logits = 4 * sampler_width(num_rows + num_drafts) * padded_vocab(model, shards) // shards
    states = 3 * num_rows * max(layer_bytes(model, "float32")) // shards
    return activations + states + 10 * logits + 4 * num_rows * max_model_len
