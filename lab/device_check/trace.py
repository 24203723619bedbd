"""The paper's trace with all requests at once, for the engine and for other systems; needs no JAX."""

import time
from collections.abc import Callable

from lab.device_check.part import Found
from orca_jax.tools.bench.workload.generate import WorkloadRequest, make_workload


def trace_of(vocab_size: int, dry_run: bool) -> list[WorkloadRequest]:
    """Requests with prompts of 32 to 512 tokens and outputs of 1 to 128; end tokens are ignored."""
    return make_workload(
        "orca", num_requests=6 if dry_run else 128, vocab_size=vocab_size, seed=0, rate=None
    )


def throughput(trace: list[WorkloadRequest], run: Callable[[list[WorkloadRequest]], int]) -> Found:
    """Measure tokens per second of one run; `run` returns the number of generated tokens.

    Raises:
        RuntimeError: the number differs from that of the trace.
    """
    start = time.perf_counter()
    generated = run(trace)
    seconds = time.perf_counter() - start
    inputs = sum(len(request.prompt_ids) for request in trace)
    outputs = sum(request.num_output for request in trace)
    if generated != outputs:
        raise RuntimeError(f"{generated} tokens were generated instead of {outputs}")
    return {
        "requests": len(trace),
        "seconds": seconds,
        "output_tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (inputs + outputs) / seconds,
    }
