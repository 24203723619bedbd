"""Measures kernels alone: bytes per second of increments, operations per second of chunks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from device_check.loads import TINY, Heads, attention_of, check_fit, llama, make_batch
from device_check.part import Found, Setting, Skip, Write, attempt, gib
from device_check.rates import GIB, bytes_of_device, compile_calls, seconds_of, seconds_per_call
from orca_jax.kernels.kv_pages import PackedPages

ROWS, CONTEXTS = (1, 8, 64, 256), (512, 4096, 32768)  # of increments
CHUNKS = (1024, 2048, 4096, 8192, 16384)
CALLS_OF_CHUNKS = 10


def speed(what: str, setting: Setting, write: Write) -> None:
    """Measure the implementation `what`: one of attention's, "gather" or "cudnn"."""
    try:
        check_fit(what, setting)
    except Skip as reason:
        write(skipped=str(reason))
        return
    heads = TINY if setting.dry_run else llama(setting)
    for rows in (2,) if setting.dry_run else ROWS:
        measure_rows(what, setting, heads, rows, write)
    measure_chunk = cudnn_chunk if what == "cudnn" else chunk
    for tokens in (32,) if setting.dry_run else CHUNKS[:: 1 if what in ("gpu", "tpu") else 2]:
        attempt(write, partial(measure_chunk, what, setting, heads, tokens), phase="chunk", rows=1, context=tokens)


def measure_rows(what: str, setting: Setting, heads: Heads, rows: int, write: Write) -> None:
    """Measure `rows` increments, at every context with a KV cache that fits into memory."""
    contexts = (64, 32) if setting.dry_run else CONTEXTS
    room = bytes_of_device() * 6 // 10
    most = room // 3 if what == "gather" else room  # it copies the pages
    fitting = [context for context in contexts if rows * context * heads.token_bytes < most]
    load = Increments(what, setting, heads, rows, max(fitting, default=0))

    def measure(context: int) -> Found:
        if context not in fitting:
            raise Skip(f"the KV cache takes {gib(rows * context * heads.token_bytes)}, of {gib(most)} available")
        return cudnn_increments(heads, setting, rows, context) if what == "cudnn" else load.measure(context)

    for context in contexts:
        attempt(write, partial(measure, context), phase="increments", rows=rows, context=context)


@dataclass
class Increments:
    """One query for each row. Contexts are values: one program serves all of them.

    Calls go through several layers' pages, more than the caches of the device hold.
    """

    name: str
    setting: Setting
    heads: Heads
    rows: int
    longest: int
    compiled: dict[int, jax.stages.Compiled] = field(default_factory=dict)  # by the width of the page table

    @property
    def repeats(self) -> int:
        """Calls in one program."""
        return 1 if self.setting.dry_run else 20 if self.rows >= 64 else 100

    @property
    def num_pages(self) -> int:
        """The pages of the longest context, or a GiB of pages."""
        size = self.rows * self.longest * self.heads.token_bytes
        return max(size, min(GIB, 64 * size)) // (self.heads.page_size * self.heads.token_bytes)

    @cached_property
    def kv(self) -> jax.Array:
        """The pages; all have the same contents."""
        shape = 1, self.heads.page_size, self.heads.token_bytes // 2
        page = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        return jax.jit(lambda x: jnp.repeat(x, self.num_pages, axis=0))(page)

    def program(self, *args: jax.Array) -> jax.stages.Compiled:
        """A program of all calls; each adds the last one's output to its queries."""
        rows, width = self.rows, args[2].shape[1]
        attend = attention_of(self.name, self.setting, scale=self.heads.head_dim**-0.5)

        def call(
            i: jax.Array, q: jax.Array, kv: jax.Array, table: jax.Array, layers: jax.Array, context: jax.Array
        ) -> jax.Array:
            start, one = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, jnp.int32)
            out = attend(q, PackedPages(kv), table + i % layers[0] * layers[1], start, one, one * context)
            return q + out * jnp.bfloat16(1e-8)

        if width not in self.compiled:
            self.compiled[width] = compile_calls(call, self.repeats, *args)
        return self.compiled[width]

    def measure(self, context: int) -> Found:
        """The time of a call, and the bytes of keys and values per second."""
        rows, heads, per_row = self.rows, self.heads, context // self.heads.page_size
        size, per_layer = rows * context * heads.token_bytes, rows * per_row
        # A gather reads all of the table, other implementations only the context.
        table = np.zeros((rows, per_row if self.name == "gather" else self.longest // heads.page_size), np.int32)
        table[:, :per_row] = np.random.default_rng(0).permutation(per_layer).reshape(rows, -1)
        layers = jnp.array([self.num_pages // per_layer, per_layer], jnp.int32)
        q = jax.random.normal(jax.random.key(1), (rows, heads.num_heads, heads.head_dim), jnp.bfloat16)
        args = q, self.kv, jnp.asarray(table), layers, jnp.int32(context)
        seconds = seconds_of(self.program(*args), *args) / self.repeats
        return {"us": seconds * 1e6, "bytes_per_s": size / seconds}


def chunk(what: str, setting: Setting, heads: Heads, tokens: int) -> Found:
    """Measure one prompt, from its first token."""
    scores = 10 * heads.num_heads * tokens**2  # bytes: in float32 twice, and in bf16
    if what == "gather" and scores > bytes_of_device() * 6 // 10:
        raise Skip(f"scores take {gib(scores)}")
    q, pages, *rows = make_batch([(tokens, tokens)], heads)
    attend = attention_of(what, setting, scale=heads.head_dim**-0.5)
    return chunk_rate(heads, tokens, setting, lambda q, kv: attend(q, PackedPages(kv), *rows), q, pages.kv)


def chunk_rate(
    heads: Heads, tokens: int, setting: Setting, attend: Callable[..., jax.Array], q: jax.Array, *kv: jax.Array
) -> Found:
    """The time of a call, and the operations per second of the two products below the diagonal."""
    repeats = 1 if setting.dry_run else CALLS_OF_CHUNKS
    seconds = seconds_per_call(lambda i, q, *kv: q + attend(q, *kv) * jnp.bfloat16(1e-8), q, *kv, repeats=repeats)
    operations = 4 * heads.head_dim * heads.num_heads * tokens * (tokens + 1) / 2
    return {"us": seconds * 1e6, "flop_per_s": operations / seconds}


def cudnn_increments(heads: Heads, setting: Setting, rows: int, context: int) -> Found:
    """Measure cuDNN over contiguous keys and values, without pages. Small ones stay in the card's L2 cache."""
    q = jax.random.normal(jax.random.key(0), (rows, 1, heads.num_heads, heads.head_dim), jnp.bfloat16)
    shape = rows, context, heads.num_kv_heads, heads.head_dim
    page = jax.random.normal(jax.random.key(1), (1, 1, *shape[2:]), jnp.bfloat16)
    k, v = (jax.jit(lambda x: jnp.broadcast_to(x, shape) + jnp.bfloat16(0))(page) for _ in range(2))
    size = rows * context * heads.token_bytes
    seconds = seconds_per_call(
        lambda i, q, k, v: q + cudnn(q, k, v, setting, is_causal=False) * jnp.bfloat16(1e-8),
        q, k, v, repeats=1 if setting.dry_run else repeats_for(size),
    )  # fmt: skip
    return {"us": seconds * 1e6, "bytes_per_s": size / seconds}


def repeats_for(size: int) -> int:
    """The number of calls for some tens of milliseconds at 3 TB/s."""
    return int(min(500, max(4, 6e10 // size)))


def cudnn_chunk(what: str, setting: Setting, heads: Heads, tokens: int) -> Found:
    """Measure cuDNN over one contiguous prompt."""
    keys = jax.random.split(jax.random.key(0), 3)
    counts = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
    q, k, v = (
        jax.random.normal(key, (1, tokens, count, heads.head_dim), jnp.bfloat16)
        for key, count in zip(keys, counts, strict=True)
    )
    return chunk_rate(heads, tokens, setting, partial(cudnn, setting=setting, is_causal=True), q, k, v)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, setting: Setting, *, is_causal: bool) -> jax.Array:
    """cuDNN's attention by JAX's public function; in a dry run XLA's."""
    kind: Any = "xla" if setting.dry_run else "cudnn"
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation=kind)
