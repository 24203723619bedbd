"""The common code of the peers' programs: flags, the trace, the model's shape, and the report of a result.

They run in environments of their own, with Python 3.11 or later. From this project they import only modules that need
the standard library alone: the trace of `python -m orca_jax.bench offline`, and the format of its result.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project is not installed in these environments

from orca_jax.bench.workload.generate import WorkloadRequest, add_workload_args, workload_from_args
from orca_jax.processor import cpu_name
from orca_jax.reporting import print_table

__all__ = ["GPT2_124M", "Generate", "WorkloadRequest", "arguments", "report", "trace_of", "warm_up"]

GPT2_124M = {  # the shape of preset:gpt2
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "bos_token_id": None,
    "eos_token_id": None,
}

Generate = Callable[[Sequence[WorkloadRequest]], list[int]]
"""Runs requests to their end, greedily; returns the number of tokens of each."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags of every peer, with the names and defaults of `python -m orca_jax.bench offline`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_args(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the trace (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and KV cache (default: %(default)s)",
    )
    threads = os.cpu_count() or 1
    parser.add_argument(
        "--threads", type=int, default=threads, metavar="N", help="CPU threads (default: one per core, %(default)s)"
    )
    return parser


def trace_of(args: argparse.Namespace) -> list[WorkloadRequest]:
    """The trace given by the flags; all requests arrive at once."""
    vocab, length = (int(str(GPT2_124M[name])) for name in ("vocab_size", "n_positions"))
    return workload_from_args(args, vocab_size=vocab, max_model_len=length, rate=None)


def warm_up(generate: Generate, trace: Sequence[WorkloadRequest]) -> None:
    """Run a few short requests, as the engine's benchmark does: the first requests pay for caches and compilation."""
    generate([WorkloadRequest(0.0, request.prompt_ids[:64], 4) for request in trace[:4]])


def report(
    title: str,
    packages: Sequence[str],
    trace: Sequence[WorkloadRequest],
    got: Sequence[int],
    wall: float,
    config: dict[str, Any],
) -> None:
    """Print a table and a line of JSON, with the names of the engine's benchmark.

    Args:
        title: heading of the table.
        packages: packages to report the versions of.
        trace: the requests.
        got: generated tokens of each request, checked against the trace.
        wall: seconds from the first request to the last token.
        config: settings of the run.

    Raises:
        SystemExit: a request got another number of tokens than the trace has.
    """
    outputs = [request.num_output for request in trace]
    if list(got) != outputs:
        raise SystemExit(f"error: requested {outputs} tokens, got {list(got)}: the run cannot be compared")
    inputs = sum(len(request.prompt_ids) for request in trace)
    result = {
        "output_tokens_per_s": sum(outputs) / wall,
        "total_tokens_per_s": (sum(outputs) + inputs) / wall,
        "requests_per_s": len(trace) / wall,
        "wall_s": wall,
    }
    hardware = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "devices": "1 x cpu",
        **{name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
    }
    print_table(title, result)
    print(json.dumps({**result, "hardware": hardware, "config": config}))
