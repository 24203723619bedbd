"""The K/V cache: how many pages fit, and the pages themselves, sharded over heads."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.config import CacheConfig, DType, ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.exec.buckets import sampler_width
from orca_jax.kernels.kv_pages import KVPages, pages_shape, pages_spec
from orca_jax.model.sharding import MESH_AXES

_CPU_SHARE = 0.5  # of the free memory: a computer has other things to do


def page_bytes(model: ModelConfig, page_size: int, dtype: DType) -> int:
    """Bytes of one page in all layers, on all devices together."""
    slot = 2 * model.num_layers * model.num_kv_heads * model.head_dim * np.dtype(dtype).itemsize
    return slot * page_size


def cache_spec(cache: CacheConfig) -> KVPages:
    """How the pages are split over the mesh: by heads."""
    return pages_spec(cache.layout, MESH_AXES["kv_heads"], jnp.dtype(cache.dtype))


def cache_shape(model: ModelConfig, cache: CacheConfig) -> KVPages:
    """The pages of all layers, without memory."""
    dtype = jnp.dtype(cache.dtype)
    num_pages = model.num_layers * cache.num_pages
    return pages_shape(cache.layout, num_pages, model.num_kv_heads, model.head_dim, cache.page_size, dtype)


def free_memory(devices: Sequence[jax.Device], utilization: float, workspace: int) -> int:
    """Bytes that the cache may take on all devices together.

    Args:
        devices: of the mesh; the weights lie there already.
        utilization: share of an accelerator's memory that this process may use in all.
        workspace: bytes that the largest program needs beside weights and cache, on one device.
    """
    if devices[0].platform == "cpu":
        return int((_free_host_memory() - workspace) * min(utilization, _CPU_SHARE))
    stats = [device.memory_stats() for device in devices]
    free = min(int(s["bytes_limit"] * utilization) - s["bytes_in_use"] for s in stats)
    return (free - workspace) * len(devices)


def size_cache(
    model: ModelConfig, *, page_size: int, dtype: DType, memory: int, num_rows: int, max_model_len: int
) -> CacheConfig:
    """As many pages as memory holds, and no more than all rows at full length can use.

    Raises:
        ConfigError: not even one request of full length fits, in its own pages and the part pages of other rows.
    """
    pages_per_row = -(-max_model_len // page_size)
    # Every row at full length, and the part pages that reservations leave unused (see KVManager).
    useful = -(-num_rows * (max_model_len + page_size - 1) // page_size)
    fitting = memory // page_bytes(model, page_size, dtype)
    if fitting < pages_per_row + num_rows:
        needed = (pages_per_row + num_rows) * page_bytes(model, page_size, dtype)
        raise ConfigError(
            f"{memory / 2**30:.2f} GiB are free for K/V, and one request of max_model_len={max_model_len} beside "
            f"{num_rows} rows needs {needed / 2**30:.2f} GiB; lower max_model_len, max_num_seqs or page_size, or "
            f"raise gpu_memory_utilization",
            param="max_model_len",
        )
    return CacheConfig(min(fitting, useful), page_size, dtype)


def allocate_cache(model: ModelConfig, cache: CacheConfig, mesh: Mesh) -> KVPages:
    """The pages, uninitialised: attention reads no slot before it was written, and memory is used as it is touched."""
    shapes = cache_shape(model, cache)
    sharding = jax.tree.map(lambda spec: NamedSharding(mesh, spec), cache_spec(cache))
    create = jax.jit(lambda: jax.tree.map(lambda x: jnp.empty(x.shape, x.dtype), shapes), out_shardings=sharding)
    pages: KVPages = create()
    return pages


def allocate_history(num_rows: int, max_model_len: int, mesh: Mesh) -> jax.Array:
    """Ids of each row's context by position, `[R, L]`, on every device; penalties are counted from it.

    It takes 4 R L bytes: 256 KiB for 64 rows of 1,024 tokens, 32 MiB for 256 rows of 32,768.
    """
    create = jax.jit(
        lambda: jnp.zeros((num_rows, max_model_len), jnp.int32), out_shardings=NamedSharding(mesh, PartitionSpec())
    )
    return create()


def _free_host_memory() -> int:
    """Bytes that programs can still take without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("free memory cannot be read on this system; set num_pages", param="num_pages")


def workspace_bytes(model: ModelConfig, num_tokens: int, num_rows: int, max_model_len: int) -> int:
    """An upper estimate of what programs need beside weights and cache on one device.

    One layer's float32 activations, the copies of logits that the full sampler makes (as they were and changed,
    counts of tokens, and what drawing gathers and orders), and the history of all rows.
    """
    activations = 4 * num_tokens * (8 * model.embed_dim + 3 * model.mlp_dim + 4 * model.num_heads * model.head_dim)
    logits = 4 * sampler_width(num_rows) * model.vocab_size
    return activations + 10 * logits + 4 * num_rows * max_model_len
