"""What the peers' programs share: flags, the trace, the model's shape, and how a result is printed.

They run in environments of their own, with Python 3.11 or later, and take from this project only what needs nothing
but the standard library: the trace that `python -m orca_jax.bench offline` runs, and the format of its result.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the project is not installed where this runs

from orca_jax.bench.workload.generate import WorkloadRequest, add_workload_args, workload_from_args
from orca_jax.reporting import cpu_name, print_table

__all__ = ["GPT2_124M", "Generate", "WorkloadRequest", "arguments", "report", "trace_of", "warm_up"]

GPT2_124M = {  # the shape that the engine calls preset:gpt2
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "bos_token_id": None,
    "eos_token_id": None,
}

Generate = Callable[[Sequence[WorkloadRequest]], list[int]]
"""Runs requests to their end, greedily, and returns how many tokens each one got."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags of every peer, named and preset as those of `python -m orca_jax.bench offline`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_args(parser)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the trace (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    threads = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=threads, metavar="N", help="default: one a core (%(default)s)")
    return parser


def trace_of(args: argparse.Namespace) -> list[WorkloadRequest]:
    """The trace that the flags name; everything arrives at once."""
    vocab, length = (int(str(GPT2_124M[name])) for name in ("vocab_size", "n_positions"))
    return workload_from_args(args, vocab_size=vocab, max_model_len=length, rate=None)


def warm_up(generate: Generate, trace: Sequence[WorkloadRequest]) -> None:
    """Touch what the first requests would otherwise pay for: a few short ones, as the engine's benchmark does."""
    generate([WorkloadRequest(0.0, request.prompt_ids[:64], 4) for request in trace[:4]])


def report(
    title: str,
    packages: Sequence[str],
    trace: Sequence[WorkloadRequest],
    got: Sequence[int],
    wall: float,
    config: dict[str, Any],
) -> None:
    """Print a table and a line of JSON, under the names that the engine's benchmark uses.

    Args:
        title: what ran.
        packages: whose versions belong to the result.
        trace: what was asked for.
        got: tokens that each request got, checked against the trace.
        wall: seconds from the first request to the last token.
        config: what it ran with.
    """
    outputs = [request.num_output for request in trace]
    if list(got) != outputs:
        raise SystemExit(f"asked for {outputs} tokens, got {list(got)}: this run compares with nothing")
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
