"""The parts that run the whole model: an iteration of increments by itself, and the engine on the paper's trace."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from gpu_kernels import Write, attempt, copy_rate
from orca_jax.bench.traces import TraceRequest, make_trace
from orca_jax.config import CacheConfig, DType, EngineConfig, ExecutorConfig, ModelConfig
from orca_jax.engine import Engine
from orca_jax.exec.executor import JaxExecutor
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import random_decoder, tensor_mesh
from orca_jax.model.transformer import Decoder
from orca_jax.request import SamplingParams
from orca_jax.scheduling import build_scheduling
from orca_jax.step import Member, RowSampling, StepPlan

ROWS = (1, 8, 64, 256)
PAGE_SIZE = 64
STEPS = 30  # measured iterations
GREEDY = RowSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def model_of(preset: str, dry_run: bool) -> ModelConfig:
    """The preset; in a dry run the same kind of model with two small layers."""
    model = read_model_config(f"preset:{preset}")
    if not dry_run:
        return model
    small = replace(model, num_layers=2, embed_dim=64, mlp_dim=128, num_heads=2, num_kv_heads=2, head_dim=32)
    return replace(small, vocab_size=512, max_positions=1024, eos_token_ids=(), bos_token_id=None)


def load(model: ModelConfig, dry_run: bool) -> Decoder:
    """Random weights; in bf16 on a GPU."""
    dtype: DType = "float32" if dry_run else "bfloat16"
    decoder = random_decoder(model, dtype=dtype, mesh=tensor_mesh(jax.devices()[:1]))
    decoder.unstack()  # as `build.py` does
    return decoder


def executor_config(
    dry_run: bool, buckets: tuple[int, ...], rows: int, max_model_len: int, num_pages: int, attention: str | None
) -> ExecutorConfig:
    """Shapes, with pages as the platform's attention wants them."""
    dtype: DType = "float32" if dry_run else "bfloat16"
    cache = CacheConfig(num_pages, PAGE_SIZE, dtype, "head_major" if dry_run else "packed")
    return ExecutorConfig(dtype, 1, buckets, rows, max_model_len, cache, attention)


def weight_bytes(decoder: Decoder) -> int:
    """Bytes that an iteration reads: all but tables of which it only looks up some rows."""
    leaves = jax.tree.leaves(nnx.state(decoder))
    total = sum(x.nbytes for x in leaves)
    looked_up = [decoder.positions] + [decoder.embedding] * (decoder.head is not None)
    return total - sum(x.nbytes for table in looked_up if table is not None for x in jax.tree.leaves(nnx.state(table)))


def step(what: str, dry_run: bool, attention: str | None, write: Write) -> None:
    """Iterations in which every row generates one token; two in flight, as the engine has them."""
    model, rows = model_of(what, dry_run), (1, 4) if dry_run else ROWS
    context = 64 if dry_run else min(1024, model.max_positions // 2)
    max_model_len = context + 2 * STEPS
    pages_per_row = -(-max_model_len // PAGE_SIZE)
    bandwidth = copy_rate(64 << 20 if dry_run else 2 << 30)
    decoder = load(model, dry_run)
    size = weight_bytes(decoder)
    config = executor_config(dry_run, rows, rows[-1], max_model_len, rows[-1] * pages_per_row, attention)
    start = time.perf_counter()
    executor = JaxExecutor(decoder, model, config, tensor_mesh(jax.devices()[:1]))
    write(weight_bytes=size, compile_s=time.perf_counter() - start, copy_bytes_per_s=bandwidth, attention=attention)
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * (4 if dry_run else 2)
    for count in rows:
        kv_bytes = count * (context + STEPS // 2) * token_bytes
        attempt(write, lambda n=count, kv=kv_bytes: run_steps(executor, n, context, size + kv, bandwidth), rows=count)  # type: ignore[misc]


def run_steps(executor: JaxExecutor, rows: int, context: int, size: int, bandwidth: float) -> dict[str, Any]:
    """Milliseconds of one iteration, its share of the measured bandwidth, and how long the device waited for us.

    Rows begin with a context that was never computed: what stands in their pages is as long to read as any.
    """
    pages = -(-(context + 2 * STEPS) // PAGE_SIZE)
    first = [
        Member(f"r{r}", r, context, (1,), True, new_pages=range(r * pages, (r + 1) * pages), sampling=GREEDY)
        for r in range(rows)
    ]
    waiting = [executor.submit(StepPlan(0, tuple(first)))]

    def advance(index: int) -> None:
        again = [
            Member(f"r{r}", r, context + index, (), True, last_on_device=True, num_old_pages=pages) for r in range(rows)
        ]
        waiting.append(executor.submit(StepPlan(index, tuple(again))))
        executor.collect(waiting.pop(0))

    for index in range(1, 4):
        advance(index)
    idle, start = executor.stats.idle_seconds, time.perf_counter()
    for index in range(4, 4 + STEPS):
        advance(index)
    seconds = (time.perf_counter() - start) / STEPS
    gap = (executor.stats.idle_seconds - idle) / STEPS
    executor.collect(waiting.pop())
    executor.rest()
    mbu = size / seconds / bandwidth
    return {"ms": seconds * 1e3, "tokens_per_s": rows / seconds, "mbu": mbu, "host_gap_ms_at_most": gap * 1e3}


def trace_of(model: ModelConfig, dry_run: bool) -> list[TraceRequest]:
    """The paper's trace, all at once; what the peers get too."""
    count = 6 if dry_run else 128
    return make_trace("orca", num_requests=count, vocab_size=model.vocab_size, seed=0, rate=None)


def serve(what: str, dry_run: bool, attention: str | None, write: Write) -> None:
    """The engine on the trace: Llama-3-8B's shape, random weights, greedy, no end tokens."""
    model = model_of("llama-3-8b", dry_run)
    trace, rows, max_model_len = trace_of(model, dry_run), 8 if dry_run else 128, 704
    buckets = (8, 128) if dry_run else (32, 128, 512, 2048)
    num_pages = (rows + 1) * -(-max_model_len // PAGE_SIZE)
    config = executor_config(dry_run, buckets, rows, max_model_len, num_pages, attention)
    executor = JaxExecutor(load(model, dry_run), model, config, tensor_mesh(jax.devices()[:1]))
    settings = EngineConfig(max_num_seqs=rows, scheduler="chunked", enable_prefix_caching=False)
    scheduler, pool = build_scheduling(settings, model, max_model_len, config.cache, buckets[-1])
    engine = Engine(executor, scheduler, pool, seed=0)
    run_requests(engine, [replace(request, num_output=2) for request in trace[:4]], "warm")
    attempt(write, lambda: throughput(trace, lambda: run_requests(engine, trace, "r")), trace="orca", system="orca-jax")


def run_requests(engine: Engine, trace: list[TraceRequest], prefix: str) -> int:
    """Tokens that all requests together got."""
    for index, request in enumerate(trace):
        params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
        engine.add(f"{prefix}{index}", request.prompt_ids, params)
    before = engine.executor.stats.tokens
    while engine.has_work:
        engine.step()
    return engine.executor.stats.tokens - before


def throughput(trace: list[TraceRequest], run: Callable[[], int]) -> dict[str, Any]:
    """Tokens a second of one run."""
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    outputs = sum(request.num_output for request in trace)
    inputs = sum(len(request.prompt_ids) for request in trace)
    return {
        "requests": len(trace),
        "seconds": seconds,
        "output_tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (inputs + outputs) / seconds,
    }
