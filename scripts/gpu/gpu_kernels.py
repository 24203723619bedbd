"""The parts that look at kernels alone: what the card can do, whether they are right, and how fast they are."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orca_jax.kernels.kv_pages import PackedPages
from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.reference import ragged_attention_reference

Write = Callable[..., None]
GIB = 1 << 30


@dataclass(frozen=True)
class Heads:
    """The shape of attention in one model."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 64

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer, in bf16."""
        return 2 * self.num_kv_heads * self.head_dim * 2


LLAMA = Heads()
TINY = Heads(2, 1, 64, 16)
INCREMENTS = [(rows, context) for context in (512, 4096, 32768) for rows in (1, 8, 64, 256)]
CHUNKS = (1024, 2048, 4096, 8192, 16384)


def machine(what: str, dry_run: bool, attention: str | None, write: Write) -> None:
    """Which card this is, and what it reaches: everything else is a fraction of these."""
    device = jax.devices()[0]
    kind, capability = device.device_kind, getattr(device, "compute_capability", None)
    write(device=kind, compute_capability=capability, jax=jax.__version__, platform=device.platform)
    write(copy_bytes_per_s=copy_rate(64 << 20 if dry_run else 4 * GIB))
    write(matmul_flop_per_s=matmul_rate(512 if dry_run else 8192))


def copy_rate(size: int) -> float:
    """Bytes read and written in a second by an elementwise operation on `size` bytes."""
    x = jnp.ones(size // 4, jnp.float32)
    return 2 * size / seconds_per_call(lambda i, x: x + 1, x, repeats=10)


def matmul_rate(n: int) -> float:
    """Operations in a second of a product of random bf16 matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    seconds = seconds_per_call(lambda i, a, b: jnp.matmul(a, b) * jnp.bfloat16(0.01), a, b, repeats=10)
    return 2 * n**3 / seconds


def seconds_per_call(call: Callable[..., jax.Array], carry: jax.Array, *fixed: Any, repeats: int) -> float:
    """Of `carry = call(i, carry, *fixed)`, repeated in one program so that the host is not measured; best of 3."""
    body = jax.jit(lambda x, *rest: lax.fori_loop(0, repeats, lambda i, x: call(i, x, *rest), x))
    program = body.lower(carry, *fixed).compile()
    jax.block_until_ready(program(carry, *fixed))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(program(carry, *fixed))
        best = min(best, time.perf_counter() - start)
    return best / repeats


def correct(what: str, dry_run: bool, attention: str | None, write: Write) -> None:
    """The implementation against the oracle, phases mixed, at real sizes."""
    batches = [("mixed", [(1, 4096), (1, 1000), (1, 77), (700, 700), (33, 1500)], LLAMA)]
    batches += [("heads of 64, no groups", [(1, 300), (1, 64), (100, 300)], Heads(25, 25, 64, 16))]
    if dry_run:
        batches = [("mixed", [(1, 200), (5, 21)], TINY)]
    for name, requests, heads in batches:
        for options in ({}, {"sliding_window": 128, "soft_cap": 5.0}):
            attempt(write, partial(compare, what, requests, heads, options, dry_run), case=name, **options)


def attempt(write: Write, measure: Callable[[], dict[str, Any]], **about: Any) -> None:
    """Write what was measured, or why it could not be."""
    try:
        found = measure()
    except Exception as problem:
        found = {"error": f"{type(problem).__name__}: {str(problem)[-400:]}"}
    write(**about, **found)


def compare(
    name: str, requests: list[tuple[int, int]], heads: Heads, options: dict[str, Any], dry_run: bool
) -> dict[str, Any]:
    """Largest difference from the oracle; more than 0.03 of outputs of order one is wrong."""
    q, pages, rows = arrays(requests, heads)
    scale = heads.head_dim**-0.5
    expected = np.asarray(jax.jit(partial(ragged_attention_reference, scale=scale, **options))(q, pages, *rows))
    actual = np.asarray(jax.jit(attention_of(name, heads, dry_run, **options))(q, pages, *rows))
    difference = float(np.abs(actual.astype(np.float32) - expected.astype(np.float32)).max())
    if not difference < 0.03:
        return {"difference": difference, "error": f"differs from the oracle by {difference:.3g}"}
    return {"difference": difference}


def arrays(requests: list[tuple[int, int]], heads: Heads) -> tuple[jax.Array, PackedPages, tuple[jax.Array, ...]]:
    """Queries, pages and rows of a batch: (tokens now, context after) of each request, pages scattered."""
    length, context = (np.array(column, np.int32) for column in zip(*requests, strict=True))
    per_row = -(-int(context.max()) // heads.page_size)
    num_pages = len(requests) * per_row
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(len(requests), per_row)
    width = heads.num_kv_heads * 2 * heads.head_dim
    kv = jax.random.normal(jax.random.key(0), (num_pages, heads.page_size, width), jnp.bfloat16)
    q = jax.random.normal(jax.random.key(1), (int(length.sum()), heads.num_heads, heads.head_dim), jnp.bfloat16)
    start = (np.cumsum(length) - length).astype(np.int32)
    return q, PackedPages(kv), tuple(map(jnp.asarray, (table, start, length, context)))


def attention_of(name: str, heads: Heads, dry_run: bool, **options: Any) -> Callable[..., jax.Array]:
    """An implementation by name, as a function of queries, pages and rows."""
    options["scale"] = heads.head_dim**-0.5
    if name == "gather":
        return partial(gather_attention, **options)
    if name == "gpu" and dry_run:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        from orca_jax.kernels.ragged_attention.gpu import ragged_attention_gpu

        return partial(ragged_attention_gpu, multiprocessors=1, interpret=plgpu.InterpretGPUParams(), **options)
    return partial(ragged_attention, implementation=name, **options)


def gather_attention(
    q: jax.Array, pages: PackedPages, table: jax.Array, start: jax.Array, length: jax.Array, context: jax.Array, *,
    scale: float,
) -> jax.Array:  # fmt: skip
    """What one would write first: gather every row's pages, attend densely. All rows have equally many queries."""
    rows, tokens = table.shape[0], q.shape[0] // table.shape[0]
    head_dim = q.shape[2]
    kv = pages.kv[table].reshape(rows, -1, pages.kv.shape[2] // (2 * head_dim), 2, head_dim)
    grouped = q.reshape(rows, tokens, kv.shape[2], -1, head_dim)
    scores = jnp.einsum("rtkgd,rckd->rkgtc", grouped, kv[:, :, :, 0], preferred_element_type=jnp.float32) * scale
    position = (context - length)[:, None] + jnp.arange(tokens)
    visible = jnp.arange(kv.shape[1]) <= position[..., None]  # [R, t, C]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -1e30), axis=-1).astype(q.dtype)
    return jnp.einsum("rkgtc,rckd->rtkgd", weights, kv[:, :, :, 1]).reshape(q.shape)


def speed(what: str, dry_run: bool, attention: str | None, write: Write) -> None:
    """Bytes a second of increments, operations a second of chunks."""
    heads = TINY if dry_run else LLAMA
    measure_increments, measure_chunk = (cudnn_increments, cudnn_chunk) if what == "cudnn" else (increments, chunk)
    for rows, context in [(1, 64)] if dry_run else INCREMENTS:
        measure = partial(measure_increments, what, heads, rows, context, dry_run)
        attempt(write, measure, phase="increments", rows=rows, context=context)
    for tokens in (32,) if dry_run else CHUNKS:
        attempt(write, partial(measure_chunk, what, heads, tokens, dry_run), phase="chunk", tokens=tokens)


def increments(name: str, heads: Heads, rows: int, context: int, dry_run: bool) -> dict[str, Any]:
    """One query for each row. Calls go through several layers' pages, so that caches of the card do not hold them."""
    size = rows * context * heads.token_bytes
    layers = 1 if dry_run else max(1, min(64, GIB // size))
    per_layer = rows * context // heads.page_size
    page = jax.random.normal(jax.random.key(0), (1, heads.page_size, heads.token_bytes // 2), jnp.bfloat16)
    kv = jax.jit(lambda x: jnp.repeat(x, layers * per_layer, axis=0))(page)
    table = np.random.default_rng(0).permutation(per_layer).astype(np.int32).reshape(rows, -1)
    q = jax.random.normal(jax.random.key(1), (rows, heads.num_heads, heads.head_dim), jnp.bfloat16)
    start, one = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, jnp.int32)
    attend = attention_of(name, heads, dry_run)

    def call(i: jax.Array, q: jax.Array, kv: jax.Array, table: jax.Array) -> jax.Array:
        out = attend(q, PackedPages(kv), table + i % layers * per_layer, start, one, one * context)
        return q + out * jnp.bfloat16(1e-8)

    seconds = seconds_per_call(call, q, kv, jnp.asarray(table), repeats=1 if dry_run else repeats_for(size))
    return {"us": seconds * 1e6, "bytes_per_s": size / seconds}


def repeats_for(size: int) -> int:
    """Calls that take some tens of milliseconds at 3 TB/s."""
    return int(min(500, max(4, 6e10 // size)))


def chunk(name: str, heads: Heads, tokens: int, dry_run: bool) -> dict[str, Any]:
    """One prompt, from its first token."""
    q, pages, rows = arrays([(tokens, tokens)], heads)
    attend = attention_of(name, heads, dry_run)
    seconds = seconds_per_call(
        lambda i, q, kv: q + attend(q, PackedPages(kv), *rows) * jnp.bfloat16(1e-8),
        q,
        pages.kv,
        repeats=1 if dry_run else 10,
    )
    return {"us": seconds * 1e6, "flop_per_s": chunk_flops(heads, tokens) / seconds}


def chunk_flops(heads: Heads, tokens: int) -> float:
    """Of the two products below the diagonal."""
    return 4 * heads.head_dim * heads.num_heads * tokens * (tokens + 1) / 2


def cudnn_increments(name: str, heads: Heads, rows: int, context: int, dry_run: bool) -> dict[str, Any]:
    """cuDNN over contiguous K and V: no pages, for comparison."""
    q = jax.random.normal(jax.random.key(0), (rows, 1, heads.num_heads, heads.head_dim), jnp.bfloat16)
    shape = rows, context, heads.num_kv_heads, heads.head_dim
    page = jax.random.normal(jax.random.key(1), (1, 1, *shape[2:]), jnp.bfloat16)
    k, v = (jax.jit(lambda x: jnp.broadcast_to(x, shape) + jnp.bfloat16(0))(page) for _ in range(2))
    size = rows * context * heads.token_bytes
    seconds = seconds_per_call(
        lambda i, q, k, v: q + cudnn(q, k, v, dry_run, is_causal=False) * jnp.bfloat16(1e-8),
        q, k, v, repeats=1 if dry_run else repeats_for(size),
    )  # fmt: skip
    return {"us": seconds * 1e6, "bytes_per_s": size / seconds, "note": "contiguous; small ones stay in the L2 cache"}


def cudnn_chunk(name: str, heads: Heads, tokens: int, dry_run: bool) -> dict[str, Any]:
    """cuDNN over one contiguous prompt."""
    keys = jax.random.split(jax.random.key(0), 3)
    counts = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
    q, k, v = (
        jax.random.normal(key, (1, tokens, count, heads.head_dim), jnp.bfloat16)
        for key, count in zip(keys, counts, strict=True)
    )
    seconds = seconds_per_call(
        lambda i, q, k, v: q + cudnn(q, k, v, dry_run, is_causal=True) * jnp.bfloat16(1e-8),
        q, k, v, repeats=1 if dry_run else 10,
    )  # fmt: skip
    return {"us": seconds * 1e6, "flop_per_s": chunk_flops(heads, tokens) / seconds}


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, dry_run: bool, *, is_causal: bool) -> jax.Array:
    """JAX's public way to cuDNN's attention; in a dry run XLA's."""
    kind: Any = "xla" if dry_run else "cudnn"
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation=kind)
