"""Measure block sizes of the TPU kernels on a TPU, and keep the fastest ones.

The command is `python -m lab.tpu_blocks [flags]`.

Each candidate runs one batch of increments and one prompt; the smallest sum of both times wins. The result is written
to the table of the package; commit this file afterwards.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.kernels.kv_pages import RowArrays, TokenMajorPages, needs_scales
from orca_jax.kernels.ragged_attention.api import Scores
from orca_jax.kernels.ragged_attention.tpu.attention import attend as ragged_attention_tpu
from orca_jax.kernels.ragged_attention.tpu.attention import refusal
from orca_jax.kernels.ragged_attention.tpu.blocks import (
    TABLE,
    BlockSizes,
    Heads,
    read_table,
    rule,
    write_table,
)
from orca_jax.values.cache_spec import ceil_div

DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
"""Types of pages. The table has one entry per size of a value, so both types of 8 bits share theirs."""


@dataclass(frozen=True)
class TuningBatch:
    """A batch of equal requests, each with `queries` tokens at the end of a context of `context` tokens."""

    requests: int
    queries: int
    context: int


@dataclass(frozen=True)
class Cost:
    """The least memory traffic and arithmetic of a batch."""

    kv_bytes: int
    flops: int

    @classmethod
    def of(cls, batch: TuningBatch, heads: Heads) -> "Cost":
        """Count keys and values of every context once, and two products for each pair of query and visible token."""
        seen = batch.queries * (2 * batch.context - batch.queries + 1) // 2
        slot = heads.num_kv_heads * 2 * heads.head_dim * heads.itemsize
        return cls(
            batch.requests * batch.context * slot,
            batch.requests * seen * 4 * heads.num_kv_heads * heads.groups * heads.head_dim,
        )


def seconds(
    batch: TuningBatch, heads: Heads, blocks: BlockSizes, *, repeats: int, interpret: bool = False
) -> float:
    """Time of one call, averaged over a chain of `repeats` calls; the queries of each are the outputs of the last."""
    pages_per_row = ceil_div(batch.context, heads.page_size)
    num_pages = batch.requests * pages_per_row
    pages = _random_pages(heads, num_pages)
    table = (
        np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(batch.requests, -1)
    )
    start = np.arange(batch.requests, dtype=np.int32) * batch.queries
    length, context = (np.full(batch.requests, n, np.int32) for n in (batch.queries, batch.context))
    queries = batch.requests * batch.queries, heads.num_kv_heads * heads.groups, heads.head_dim
    q = jax.random.normal(
        jax.random.key(1), queries, jnp.float32 if heads.itemsize == 4 else jnp.bfloat16
    )

    @jax.jit
    def chain(q: jax.Array, pages: TokenMajorPages, requests: RowArrays) -> jax.Array:
        def call(_: jax.Array, q: jax.Array) -> jax.Array:
            scores = Scores(heads.head_dim**-0.5)
            return ragged_attention_tpu(
                q, pages, requests, scores, blocks=blocks, interpret=interpret
            )

        return jax.lax.fori_loop(0, repeats, call, q)

    args = q, pages, RowArrays(*map(jnp.asarray, (table, start, length, context)))
    chain(*args).block_until_ready()
    begin = time.perf_counter()
    chain(*args).block_until_ready()
    return (time.perf_counter() - begin) / repeats


def _random_pages(heads: Heads, num_pages: int) -> TokenMajorPages:
    """Random pages of the first type in `DTYPES` with the item size of `heads`."""
    dtype = next(jnp.dtype(name) for name in DTYPES if jnp.dtype(name).itemsize == heads.itemsize)
    shape = num_pages, heads.page_size, heads.num_kv_heads * 2 * heads.head_dim
    if not needs_scales(dtype):
        return TokenMajorPages(jax.random.normal(jax.random.key(0), shape, dtype))
    values = jax.random.randint(jax.random.key(0), shape, -127, 128, dtype)
    return TokenMajorPages(values, jnp.full((num_pages, 1, 2 * heads.num_kv_heads), 0.01))


def candidates(heads: Heads) -> Iterator[BlockSizes]:
    """The sizes of the rule, then others around them."""
    first = rule(heads)
    yield first
    seen = {first}
    for fetch in (first.fetch_pages // 2, first.fetch_pages, 2 * first.fetch_pages):
        for factor in (0.5, 1, 2):
            pages = [int(factor * n) for n in (first.compute_pages, first.whole_pages)]
            for query_block in (max(16, first.query_block // 2), first.query_block):
                sizes = replace(
                    first,
                    query_block=query_block,
                    fetch_pages=fetch,
                    compute_pages=pages[0],
                    whole_pages=pages[1],
                )
                if min(pages) >= 1 and max(pages) <= fetch <= 128 and sizes not in seen:
                    seen.add(sizes)
                    yield sizes
    for fetch in (first.increment_pages // 2, first.increment_pages):
        for part in (first.part_pages // 2, first.part_pages):
            sizes = replace(
                first,
                increment_pages=fetch,
                part_pages=part,
                buffers=first.buffers * first.increment_pages // max(1, fetch),
            )
            if 1 <= part <= fetch and sizes not in seen:
                seen.add(sizes)
                yield sizes


def tune(
    heads: Heads,
    batches: Sequence[TuningBatch],
    *,
    repeats: int,
    interpret: bool,
    most: int | None = None,
) -> BlockSizes:
    """Print the times of each candidate (at most `most` of them), and return the fastest."""
    best: tuple[float, BlockSizes] | None = None
    for sizes in list(candidates(heads))[:most]:
        try:
            times = [
                seconds(batch, heads, sizes, repeats=repeats, interpret=interpret)
                for batch in batches
            ]
        except jax.errors.JaxRuntimeError as error:  # it does not fit into the chip's memory
            print(f"{sizes}: {str(error).splitlines()[0][:80]}")
            continue
        print(f"{sizes}: {', '.join(f'{x * 1e6:.0f} us' for x in times)}", flush=True)
        if best is None or sum(times) < best[0]:
            best = sum(times), sizes
    if best is None:
        raise SystemExit(
            "error: no candidate fits into the chip's memory; use a smaller --page-size"
        )
    return best[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Tune one shape of heads. Returns 2 without a TPU."""
    name = "python -m lab.tpu_blocks"
    parser = argparse.ArgumentParser(name, description=__doc__, allow_abbrev=False)
    add: Any = parser.add_argument
    add(
        "--num-heads",
        type=int,
        default=32,
        metavar="H",
        help="query heads of one device (default: 32)",
    )
    add(
        "--num-kv-heads",
        type=int,
        default=8,
        metavar="K",
        help="KV heads of one device (default: 8)",
    )
    add("--head-dim", type=int, default=128, metavar="D", help="size of a head (default: 128)")
    add("--page-size", type=int, default=128, metavar="S", help="tokens in a page (default: 128)")
    add(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="type of the KV cache (default: bfloat16)",
    )
    add(
        "--out",
        type=Path,
        default=TABLE,
        metavar="FILE",
        help="JSON table to update (default: the package's)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="interpret two candidates at a small size; needs no TPU, writes no file",
    )
    args = parser.parse_args(argv)
    if not args.dry_run and jax.default_backend() != "tpu":
        print("error: no TPU found; use --dry-run to try the command without one", file=sys.stderr)
        return 2
    if args.num_kv_heads < 1 or args.num_heads % args.num_kv_heads:
        parser.error(
            f"--num-heads {args.num_heads} is not a multiple of --num-kv-heads {args.num_kv_heads}"
        )
    groups = args.num_heads // args.num_kv_heads
    itemsize = jnp.dtype(args.dtype).itemsize
    heads = Heads(
        jax.devices()[0].device_kind,
        args.num_kv_heads,
        groups,
        args.head_dim,
        args.page_size,
        itemsize,
    )
    q = jax.ShapeDtypeStruct((1, args.num_heads, args.head_dim), jnp.bfloat16)
    if (reason := refusal(q, jax.eval_shape(lambda: _random_pages(heads, 1)))) is not None:
        parser.error(reason)
    small = [TuningBatch(2, 1, 2 * args.page_size), TuningBatch(1, 32, 64)]
    full = [TuningBatch(64, 1, 4096), TuningBatch(1, 4096, 4096)]
    batches, repeats, most = (small, 1, 2) if args.dry_run else (full, 20, None)
    best = tune(heads, batches, repeats=repeats, interpret=args.dry_run, most=most)
    table = read_table(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    if args.dry_run:
        print(f"would write {asdict(best)} for {asdict(heads)}")
        return 0
    try:
        args.out.write_text(write_table({**table, heads: best}), encoding="utf-8")
    except OSError as error:
        print(f"error: --out: {args.out} cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
