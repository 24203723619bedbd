"""Measures kernels alone: bytes per second of increments, operations per second of chunks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lab.device_check.loads import (
    TINY,
    Heads,
    attention_of,
    is_fit,
    llama,
    make_batch,
    planned_attention_of,
)
from lab.device_check.part import Found, Setting, Skip, Write, attempt, gib
from lab.device_check.rates import GIB, bytes_of_device, compile_calls, seconds_per_call, timed
from orca_jax.kernels.kv_pages import TokenMajorPages
from orca_jax.kernels.ragged_attention import RowArrays, Scores

ROWS, CONTEXTS = (64, 1, 8, 256), (512, 4096, 32768)  # of increments
CHUNKS = (
    (2048, 2048),
    (64, 32768),
    (16384, 16384),
    (512, 512),
    (1024, 1024),
    (4096, 4096),
    (8192, 8192),
)
"""Queries, and the context after them."""
CALLS_OF_CHUNKS = 10
SYSTEMS = ("triton", "cudnn", "dense")  # of `speed:others`, in one process
OWN = ("gpu", "tpu")
PAGES = 1024  # with contents of their own: more than the caches of a device hold


def speed(what: str, setting: Setting, write: Write) -> None:
    """Measure the implementation `what`: one of attention's, "dense", "cudnn", or "others" for several."""
    if what == "others":
        for name in SYSTEMS:
            measure_system(name, setting, partial(write, system=name))
    else:
        measure_system(what, setting, write)


def measure_system(what: str, setting: Setting, write: Write) -> None:
    """Measure increments and chunks of one implementation, the most telling first."""
    if not is_fit(what, setting, write):
        return
    heads = TINY if setting.dry_run else llama()
    rows = (2,) if setting.dry_run else ROWS if what in OWN else ROWS[:2]
    for count in rows:
        measure_rows(what, setting, heads, count, write)
    if what in OWN and not setting.dry_run:
        measure_rows(what, setting, llama(64), 64, write)
    measure_chunk = cudnn_chunk if what == "cudnn" else chunk
    chunks = (
        ((32, 32), (8, 64))
        if setting.dry_run
        else CHUNKS
        if what in OWN
        else CHUNKS[:1] + CHUNKS[2:3]
    )
    for tokens, context in chunks:
        if tokens == context or what not in ("cudnn", "dense"):  # those two take whole prompts
            measure = partial(measure_chunk, what, setting, heads, tokens, context)
            attempt(
                write,
                measure,
                phase="chunk",
                rows=1,
                tokens=tokens,
                context=context,
                page=heads.page_size,
            )


def measure_rows(what: str, setting: Setting, heads: Heads, rows: int, write: Write) -> None:
    """Measure `rows` increments, at every context with a KV cache that fits into memory, and at mixed contexts."""
    contexts = (64, 32) if setting.dry_run else CONTEXTS
    room = bytes_of_device() * 6 // 10
    most = room // 3 if what == "dense" else room  # it copies the pages
    fitting = [context for context in contexts if rows * context * heads.token_bytes < most]
    load = Increments(what, setting, heads, rows, max(fitting, default=0))

    def measure(context: int) -> Found:
        if context not in fitting:
            raise Skip(
                f"the KV cache takes {gib(rows * context * heads.token_bytes)}, of {gib(most)} available"
            )
        if what == "cudnn":
            return cudnn_increments(heads, setting, rows, context)
        return load.measure(np.full(rows, context, np.int32))

    for context in contexts:
        attempt(
            write,
            partial(measure, context),
            phase="increments",
            rows=rows,
            context=context,
            page=heads.page_size,
        )
    if what in OWN and rows == 64 and fitting:
        mixed = (
            np.random.default_rng(0).lognormal(7, 1, rows).clip(16, load.longest).astype(np.int32)
        )
        about = {"phase": "increments", "rows": rows, "context": "mixed", "page": heads.page_size}
        attempt(write, partial(load.measure, mixed), **about)


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
    # by the width of the page table
    compiled: dict[int, jax.stages.Compiled] = field(default_factory=dict)

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
        """Random pages; a large cache repeats them, in another order."""
        shape = min(PAGES, self.num_pages), self.heads.page_size, self.heads.token_bytes // 2
        pages = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        order = np.random.default_rng(1).integers(0, shape[0], self.num_pages)
        return jax.jit(lambda pages, order: pages[order])(pages, order)

    def program(self, *args: jax.Array) -> jax.stages.Compiled:
        """A program of all calls; each adds the last one's output to its queries. A TPU's plan is made once."""
        rows = self.rows
        width = args[2].shape[1]
        start = jnp.arange(rows, dtype=jnp.int32)
        one = jnp.ones(rows, jnp.int32)
        prepare, attend = planned_attention_of(
            self.name, self.setting, Scores(self.heads.head_dim**-0.5)
        )

        def calls(
            q: jax.Array, kv: jax.Array, table: jax.Array, layers: jax.Array, contexts: jax.Array
        ) -> jax.Array:
            pages = TokenMajorPages(kv)
            plan = prepare(q, pages, RowArrays(table, start, one, contexts))

            def call(i: jax.Array, q: jax.Array) -> jax.Array:
                return q + attend(q, pages, plan, i % layers[0] * layers[1]) * jnp.bfloat16(1e-8)

            return lax.fori_loop(0, self.repeats, call, q)

        if width not in self.compiled:
            self.compiled[width] = jax.jit(calls).lower(*args).compile()
        return self.compiled[width]

    def measure(self, contexts: np.ndarray) -> Found:
        """The time of a call, and the bytes of keys and values per second."""
        rows = self.rows
        heads = self.heads
        per_row = -(-int(contexts.max()) // heads.page_size)
        per_layer = rows * per_row
        # "dense" reads all of the table, other implementations only the context.
        width = per_row if self.name == "dense" else self.longest // heads.page_size
        table = np.zeros((rows, width), np.int32)
        table[:, :per_row] = np.random.default_rng(0).permutation(per_layer).reshape(rows, -1)
        layers = jnp.array([self.num_pages // per_layer, per_layer], jnp.int32)
        q = jax.random.normal(
            jax.random.key(1), (rows, heads.num_heads, heads.head_dim), jnp.bfloat16
        )
        args = q, self.kv, jnp.asarray(table), layers, jnp.asarray(contexts)
        seconds, found = timed(self.program(*args), self.repeats, *args)
        return {**found, "bytes_per_s": int(contexts.sum()) * heads.token_bytes / seconds}


def chunk(what: str, setting: Setting, heads: Heads, tokens: int, context: int) -> Found:
    """Measure the last `tokens` of one prompt."""
    size = 10 * heads.num_heads * tokens * context  # bytes of scores: in float32 twice, and in bf16
    if what == "dense" and size > bytes_of_device() * 6 // 10:
        raise Skip(f"scores take {gib(size)}")
    q, pages, rows = make_batch([(tokens, context)], heads)
    attend = attention_of(what, setting, Scores(heads.head_dim**-0.5))
    return chunk_rate(
        heads,
        (tokens, context),
        setting,
        lambda q, kv: attend(q, TokenMajorPages(kv), rows),
        q,
        pages.kv,
    )


def chunk_rate(
    heads: Heads,
    sizes: tuple[int, int],
    setting: Setting,
    attend: Callable[..., jax.Array],
    q: jax.Array,
    *kv: jax.Array,
) -> Found:
    """The time of a call, and the operations per second of the two products below the diagonal."""
    repeats = 1 if setting.dry_run else CALLS_OF_CHUNKS
    tokens, context = sizes
    program = compile_calls(
        lambda i, q, *kv: q + attend(q, *kv) * jnp.bfloat16(1e-8), repeats, q, *kv
    )
    seconds, found = timed(program, repeats, q, *kv)
    seen = tokens * (context - tokens) + tokens * (tokens + 1) / 2
    return {**found, "flop_per_s": 4 * heads.head_dim * heads.num_heads * seen / seconds}


def cudnn_increments(heads: Heads, setting: Setting, rows: int, context: int) -> Found:
    """Measure cuDNN over contiguous keys and values, without pages. Small ones stay in the card's L2 cache."""
    q = jax.random.normal(
        jax.random.key(0), (rows, 1, heads.num_heads, heads.head_dim), jnp.bfloat16
    )
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


def cudnn_chunk(what: str, setting: Setting, heads: Heads, tokens: int, context: int) -> Found:
    """Measure cuDNN over one contiguous prompt."""
    keys = jax.random.split(jax.random.key(0), 3)
    counts = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
    q, k, v = (
        jax.random.normal(key, (1, tokens, count, heads.head_dim), jnp.bfloat16)
        for key, count in zip(keys, counts, strict=True)
    )
    return chunk_rate(
        heads, (tokens, context), setting, partial(cudnn, setting=setting, is_causal=True), q, k, v
    )


def cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, setting: Setting, *, is_causal: bool
) -> jax.Array:
    """cuDNN's attention by JAX's public function; in a dry run XLA's."""
    kind: Any = "xla" if setting.dry_run else "cudnn"
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation=kind)
