"""The parts that look at kernels alone: what the card can do, whether they are right, and how fast they are."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from orca_jax.kernels.kv_pages import PackedPages
from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.cases import CASES, Case, make_arrays
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
ROWS, CONTEXTS = (1, 8, 64, 256), (512, 4096, 32768)  # of increments
CHUNKS = (1024, 2048, 4096, 8192, 16384)
WIDE = ("3 heads of 80", "heads of 96", "heads of 256", "bfloat16", "int8 pages", "fp8 pages")


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
    return seconds_of(repeated(call, repeats), carry, *fixed) / repeats


def repeated(call: Callable[..., jax.Array], repeats: int) -> Callable[..., jax.Array]:
    """One program of many calls; their number is no argument, since a GPU would ask its host at every turn."""
    return jax.jit(lambda x, *rest: lax.fori_loop(0, repeats, lambda i, x: call(i, x, *rest), x))


def seconds_of(program: Callable[..., jax.Array], *args: Any) -> float:
    """Of a run, after one that is not measured: the best of 3, or of fewer once half a second is spent."""
    jax.block_until_ready(program(*args))
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < 0.5:
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        taken.append(time.perf_counter() - start)
    return min(taken)


def correct(what: str, dry_run: bool, attention: str | None, write: Write) -> None:
    """The implementation against the oracle, phases mixed, at real sizes."""
    if reason := unfit(what, dry_run):
        write(skipped=reason)
        return
    batches = [("mixed", [(1, 4096), (1, 1000), (1, 77), (700, 700), (33, 1500)], LLAMA)]
    batches += [("heads of 64, no groups", [(1, 300), (1, 64), (100, 300)], Heads(25, 25, 64, 16))]
    if dry_run:
        batches = [("mixed", [(1, 200), (5, 21)], TINY)]
    for name, requests, heads in batches:
        for options in ({}, {"sliding_window": 128, "soft_cap": 5.0}):
            attempt(write, partial(compare, what, requests, heads, options, dry_run), case=name, **options)
    if what == "triton":  # the shapes and types that only these kernels take
        for case in [case for case in CASES if case.name in (WIDE[-1:] if dry_run else WIDE)]:
            attempt(write, partial(compare_case, case, dry_run), case=case.name)


def unfit(name: str, dry_run: bool) -> str | None:
    """Why an implementation cannot run here."""
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    if name == "gpu" and not dry_run and not capability.startswith("9."):
        return f"these kernels are for Hopper, and this card has compute capability {capability}"
    if name == "gpu" and dry_run and jax.__version_info__ < (0, 12):
        return "the simulator before jax 0.12 wants every thread to wait for a barrier's last completion"
    return None


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


def compare_case(case: Case, dry_run: bool) -> dict[str, Any]:
    """A case of the table that all implementations pass on a CPU."""
    case = replace(case, head_dim=max(64, case.head_dim))
    given = jax.tree.map(jnp.asarray, make_arrays(case, layout="packed"))
    attend = interpreted("triton") if dry_run else partial(ragged_attention, implementation="triton")
    wanted, found = (
        np.asarray(jax.jit(partial(call, **case.options))(*given), np.float32)[: int(given.query_len.sum())]
        for call in (ragged_attention_reference, attend)
    )
    difference = float(np.abs(wanted - found).max())
    if not difference < max(case.tolerance, 1e-4):  # sums in another order
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
    if dry_run and name in ("gpu", "triton"):
        return interpreted(name, **options)
    return partial(ragged_attention, implementation=name, **options)


def interpreted(name: str, **options: Any) -> Callable[..., jax.Array]:
    """Kernels for GPUs on a CPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from orca_jax.kernels.ragged_attention.gpu import ragged_attention_gpu
    from orca_jax.kernels.ragged_attention.triton import ragged_attention_triton

    if name == "triton":
        return partial(ragged_attention_triton, multiprocessors=1, interpret=True, **options)
    return partial(ragged_attention_gpu, multiprocessors=1, interpret=plgpu.InterpretGPUParams(), **options)


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
    if reason := unfit(what, dry_run):
        write(skipped=reason)
        return
    heads, longest = (TINY, 1 << 20) if dry_run else (LLAMA, bytes_of_device() * 6 // 10)
    for rows in (2,) if dry_run else ROWS:
        known = [
            context for context in ((64, 32) if dry_run else CONTEXTS) if rows * context * heads.token_bytes < longest
        ]
        measure: Callable[[int], dict[str, Any]] = (
            partial(cudnn_increments, heads, rows, dry_run)
            if what == "cudnn"
            else Increments(what, heads, rows, max(known), dry_run).measure
        )
        for context in known:
            attempt(write, partial(measure, context), phase="increments", rows=rows, context=context)
    measure_chunk = cudnn_chunk if what == "cudnn" else chunk
    for tokens in (32,) if dry_run else CHUNKS[:: 1 if what == "gpu" else 2]:
        attempt(write, partial(measure_chunk, what, heads, tokens, dry_run), phase="chunk", tokens=tokens)


def bytes_of_device() -> int:
    """Memory that JAX may use."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 16 * GIB))


class Increments:
    """One query for each row, over contexts that are values: one program for all lengths.

    Calls go through several layers' pages, so that caches of the card do not hold them.
    """

    def __init__(self, name: str, heads: Heads, rows: int, longest: int, dry_run: bool) -> None:
        self.heads, self.rows, self.longest, self.is_gather = heads, rows, longest, name == "gather"
        self.repeats = 1 if dry_run else 20 if rows >= 64 else 100
        size = rows * longest * heads.token_bytes
        self.num_pages = max(size, min(GIB, 64 * size)) // (heads.page_size * heads.token_bytes)
        page = jax.random.normal(jax.random.key(0), (1, heads.page_size, heads.token_bytes // 2), jnp.bfloat16)
        self.kv = jax.jit(lambda x: jnp.repeat(x, self.num_pages, axis=0))(page)
        self.q = jax.random.normal(jax.random.key(1), (rows, heads.num_heads, heads.head_dim), jnp.bfloat16)
        attend = attention_of(name, heads, dry_run)

        def call(
            i: jax.Array, q: jax.Array, kv: jax.Array, table: jax.Array, layers: jax.Array, context: jax.Array
        ) -> jax.Array:
            start, one = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, jnp.int32)
            out = attend(q, PackedPages(kv), table + i % layers[0] * layers[1], start, one, one * context)
            return q + out * jnp.bfloat16(1e-8)

        self.program = repeated(call, self.repeats)

    def measure(self, context: int) -> dict[str, Any]:
        """Time of a call, and bytes of K and V over it."""
        rows, heads, per_row = self.rows, self.heads, context // self.heads.page_size
        size, per_layer = rows * context * heads.token_bytes, rows * per_row
        # A gather reads all of the table, other implementations what the context says.
        table = np.zeros((rows, per_row if self.is_gather else self.longest // heads.page_size), np.int32)
        table[:, :per_row] = np.random.default_rng(0).permutation(per_layer).reshape(rows, -1)
        layers = jnp.array([self.num_pages // per_layer, per_layer], jnp.int32)
        args = self.q, self.kv, jnp.asarray(table), layers, jnp.int32(context)
        seconds = seconds_of(self.program, *args) / self.repeats
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


def cudnn_increments(heads: Heads, rows: int, dry_run: bool, context: int) -> dict[str, Any]:
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
