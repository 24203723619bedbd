"""Measure a decode step of a model with windows in all layers, after short and after long contexts."""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import jax

from orca_jax.assembly.executor import arrange
from orca_jax.cache_spec import NO_BLOCK, form_groups
from orca_jax.config import CacheConfig, ExecutorConfig, ModelConfig, RopeConfig
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.stage import StageModel
from orca_jax.kernels.native import load_library
from orca_jax.model.load import random_decoder, tensor_mesh
from orca_jax.reporting import hardware, print_table
from orca_jax.request import SamplingParams
from orca_jax.step import Member, RowSampling, StepPlan

ROWS, PAGE_SIZE, WINDOW, SAMPLING = 8, 128, 1024, RowSampling(SamplingParams(temperature=0), 0)
BACKENDS = ("native", "xla", "gather", "reference")
MODEL = ModelConfig(
    family="mistral", vocab_size=512, num_layers=4, embed_dim=256, num_heads=8, num_kv_heads=2, head_dim=64,
    mlp_dim=512, max_positions=65536, norm="rmsnorm", norm_eps=1e-5, activation="silu", gated_mlp=True,
    attention_bias=False, mlp_bias=False, tied_embeddings=True, rope=RopeConfig(), sliding_window=WINDOW,
)  # fmt: skip


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[2048, 32768], metavar="N", help="tokens (default: 2048 32768)"
    )
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="of attention (default: all)")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of each context (default: 40)")


def run(args: argparse.Namespace) -> None:
    """Print the median milliseconds of a step after each context, by backend; the last line is JSON."""
    found = {name: _measure(name, args.contexts, args.steps) for name in args.backends}
    for name, row in found.items():
        print_table(f"{name}, {ROWS} rows, a window of {WINDOW} tokens, ms for a step", row)
    print(json.dumps({"rows": found, "steps": args.steps, "hardware": hardware()}))


def _measure(backend: str, contexts: Sequence[int], steps: int) -> dict[str, float]:
    """Return the median milliseconds of a step after each context. The contexts take turns."""
    executor = _executor(backend, max(contexts))
    (group,) = executor.config.cache.groups
    plans, times = {}, dict[int, list[float]]()
    for context in contexts:
        first, end = group.first_needed(context - 1) // PAGE_SIZE, -(-context // PAGE_SIZE)
        members = []
        for row in range(ROWS):
            blocks = [NO_BLOCK] * first + [row * (end - first) + index for index in range(end - first)]
            members.append(Member(str(row), row, context - 1, [7], True, new_blocks=(blocks,), sampling=SAMPLING))
        plans[context], times[context] = StepPlan(0, tuple(members)), []
    for _ in range(steps):
        for context, plan in plans.items():
            start = time.perf_counter()
            executor.collect(executor.submit(plan))
            times[context].append(1e3 * (time.perf_counter() - start))
    executor.close()
    return {str(context): statistics.median(each) for context, each in times.items()}


def _executor(backend: str, longest: int) -> JaxExecutor:
    """Return an executor with blocks for all rows."""
    library = load_library(None) if backend == "native" else None
    mesh = tensor_mesh(jax.devices()[:1])
    decoder = random_decoder(MODEL, dtype="float32", mesh=mesh, seed=0)
    arrange("cpu", decoder, library)
    if library is not None:
        decoder.pack(library, 1)
    groups = form_groups(MODEL.layer_caches, longest)
    cache = CacheConfig(groups, (ROWS * (WINDOW // PAGE_SIZE + 2),), PAGE_SIZE, "float32")
    config = ExecutorConfig("float32", 1, (ROWS,), ROWS, longest, cache, backend)
    return JaxExecutor([StageModel(decoder, mesh)], MODEL, config, greedy_only=True)
