"""What a TPU makes of the kernels: right, how fast against the chip's own copy and product, and a short serving run.

    scripts/tpu_check [--dry-run] [--model preset:llama-3-8b]

Every part prints as it ends; the last line is one JSON object with all of them. The exit status is 1 where a case is
not what the oracle says, or the serving run failed.
"""

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from orca_jax.bench.__main__ import main as bench
from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.kernels.ragged_attention.cases import CASES, Case, make_arrays
from orca_jax.kernels.ragged_attention.tpu import ragged_attention_tpu
from orca_jax.kernels.ragged_attention.tpu_blocks import Heads, choose_blocks
from orca_jax.kernels.tune import Cost, Load, seconds

DRY_CASES = ("one token", "heads of 128")
INCREMENTS = [Load(rows, 1, context) for rows in (1, 8, 64, 256) for context in (512, 4096, 32768)]
CHUNKS = [Load(1, n, n) for n in (1024, 4096, 16384)]
KV_BYTES = 8 << 30  # of a load; a chip has 16 GiB or more


def check_cases(is_dry: bool) -> tuple[dict[str, float], list[str]]:
    """The largest difference from the oracle in each case, and the cases where it is past the tolerance."""
    found: dict[str, float] = {}
    wrong = []
    for case in CASES:
        if case.page_dtype in ("float32", "bfloat16") and (not is_dry or case.name in DRY_CASES):
            found[case.name] = difference(case, is_dry)
            # Products of float32 are made of several in bfloat16 on a TPU.
            is_right = found[case.name] <= max(case.tolerance, 1e-4)
            wrong += [] if is_right else [case.name]
            print(f"{case.name:45s} {found[case.name]:.1e}{'' if is_right else '  WRONG'}", flush=True)
    return found, wrong


def difference(case: Case, is_dry: bool) -> float:
    """Between kernel and oracle, over the tokens of requests."""
    packed, plain = (jax.tree.map(jnp.asarray, make_arrays(case, 1, layout)) for layout in ("packed", "head_major"))
    actual = jax.jit(lambda a: ragged_attention_tpu(*a, **case.options, interpret=is_dry))(packed)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(lambda a: ragged_attention(*a, **case.options, implementation="reference"))(plain)
    used = sum(count for count, _ in case.requests)
    apart = np.asarray(actual[:used], np.float32) - np.asarray(wanted[:used], np.float32)
    return float(np.abs(apart).max())


def rate(work: Callable[[jax.Array], jax.Array], start: jax.Array, amount: float) -> float:
    """`amount` per second of a function, in a chain of 20 calls, each on the last one's result."""
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: work(x), x))
    chain(start).block_until_ready()
    begin = time.perf_counter()
    chain(start).block_until_ready()
    return 20 * amount / (time.perf_counter() - begin)


def limits(is_dry: bool) -> dict[str, float]:
    """What this chip reaches at best: bytes/s read and written by a copy, FLOP/s of a bfloat16 product."""
    size = 128 if is_dry else 8192
    x = jnp.ones((size, size), jnp.bfloat16)
    big = jnp.ones((1 << (16 if is_dry else 28),), jnp.float32)
    product = rate(lambda x: (x @ x) * jnp.bfloat16(1 / size), x, 2.0 * size**3)
    found = {"bytes_per_s": rate(lambda x: x + 1.0, big, 2.0 * big.nbytes), "flops": product}
    print(f"copy {found['bytes_per_s'] / 1e9:.0f} GB/s, product {found['flops'] / 1e12:.2f} TFLOP/s", flush=True)
    return found


def roofline(heads: Heads, best: dict[str, float], is_dry: bool) -> list[dict[str, Any]]:
    """Increments against the copy, chunks against the product."""
    loads = [Load(2, 1, 2 * heads.page_size), Load(1, 32, 64)] if is_dry else [*INCREMENTS, *CHUNKS]
    found = []
    for load in loads:
        cost = Cost.of(load, heads)
        if cost.kv_bytes > KV_BYTES:
            continue
        taken = seconds(load, heads, choose_blocks(heads), repeats=1 if is_dry else 20, interpret=is_dry)
        bandwidth, flops = cost.kv_bytes / taken / best["bytes_per_s"], cost.flops / taken / best["flops"]
        row = {"requests": load.requests, "queries": load.queries, "context": load.context, "seconds": taken}
        found.append({**row, "of_copy": bandwidth, "of_product": flops})
        sizes = f"{load.requests:4d} x {load.queries:5d} queries at {load.context:6d}"
        print(f"{sizes}: {taken * 1e6:9.0f} us, {bandwidth:.1%} of the copy, {flops:.1%} of the product", flush=True)
    return found


def serve(model: str, is_dry: bool) -> dict[str, Any]:
    """A trace through the engine, offline."""
    flags = ["offline", "--model", model, "--num-requests", "2" if is_dry else "256", "--max-num-seqs", "64"]
    flags += ["--max-model-len", "640"]
    flags += ["--max-num-batched-tokens", "64", "--num-pages", "64"] if is_dry else []
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = bench(flags)
    print(out.getvalue().strip().rpartition("\n")[0])
    if status:
        return {"error": f"the serving run ended with status {status}"}
    result: dict[str, Any] = json.loads(out.getvalue().strip().splitlines()[-1])
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/tpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small sizes, interpreted, on a CPU")
    parser.add_argument("--model", help="for the serving run (default: preset:gpt2, or the demo in a dry run)")
    args = parser.parse_args(argv)
    if args.dry_run:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "tpu":
        parser.error("there is no TPU here; --dry-run shows what would be done")
    heads = Heads(jax.devices()[0].device_kind, 8, 4, 128, 128, 2)
    best = limits(args.dry_run)
    differences, wrong = check_cases(args.dry_run)
    found: dict[str, Any] = {
        "device": heads.device,
        "dry_run": args.dry_run,
        "jax": jax.__version__,
        "limits": best,
        "differences": differences,
        "wrong": wrong,
        "roofline": roofline(heads, best, args.dry_run),
        "serving": serve(args.model or ("demo" if args.dry_run else "preset:gpt2"), args.dry_run),
    }
    print(json.dumps(found))
    return 1 if wrong or "error" in found["serving"] else 0


if __name__ == "__main__":
    sys.exit(main())
