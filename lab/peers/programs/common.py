"""The common code of the peers' programs: their flags, their inputs, and the passes over a workload.

The programs run in environments of their own, with Python 3.11 or later, and import nothing of this project. Their
inputs are files that `python -m lab peers --write DIR` writes: a workload as JSON, and a model directory.

By hand, a program runs --passes passes and prints a table and a line of JSON. With --on-request it is one side of a
comparison: it prints `@peer {"ready": ...}` when the model is loaded and warm, then runs a pass for each line on
standard input, and prints `@peer {"pass": ...}` after each. It ends with its input. Other lines on standard output are
logs. A program that runs a server prints `ready` with its address when it answers, and ends with its input.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "@peer "
_FILES = ("workload", "model", "on_request")  # flags that say nothing about a result


@dataclass(frozen=True)
class Request:
    """A request of the workload. It generates exactly `num_output` tokens greedily; no token ends it."""

    prompt_ids: list[int]
    num_output: int


Generate = Callable[[Sequence[Request]], list[int]]
"""Runs requests to their end, all given at once; returns the number of generated tokens of each."""


def arguments(
    description: str | None, modes: Sequence[str], *, serves: bool = False
) -> argparse.ArgumentParser:
    """The flags of every peer, for passes over a workload or for a server."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if not serves:
        parser.add_argument(
            "--workload", required=True, metavar="FILE", help="workload.json of --write"
        )
        parser.add_argument(
            "--passes",
            type=int,
            default=1,
            metavar="N",
            help="passes over the workload (default: 1)",
        )
        parser.add_argument(
            "--on-request", action="store_true", help="run a pass for each line on standard input"
        )
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="model directory in Hugging Face's format"
    )
    parser.add_argument(
        "--mode", choices=modes, default=modes[0], help="way of running (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and KV cache (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="processors to use, and CPU threads (default: all processors)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="N",
        help="requests in one iteration or batch (default: 64)",
    )
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the flags, and keep this process on its first --threads processors.

    This comes before the imports of the peer's packages, which read the number of processors.
    """
    args = parser.parse_args()
    allowed = sorted(os.sched_getaffinity(0))
    args.threads = args.threads or len(allowed)
    if not 1 <= args.threads <= len(allowed):
        parser.error(
            f"argument --threads: must be from 1 to {len(allowed)}, the available processors"
        )
    os.sched_setaffinity(0, allowed[: args.threads])
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    return args


def read_workload(path: str) -> list[Request]:
    """Read the requests of a workload file; they must all arrive at once."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if any(one["arrival"] for one in found["requests"]):
        raise SystemExit(
            "error: the peers run all requests at once; write the workload without arrival times"
        )
    return [Request(one["prompt_ids"], one["num_output"]) for one in found["requests"]]


def run(
    args: argparse.Namespace, generate: Generate, packages: Sequence[str], config: dict[str, Any]
) -> None:
    """Warm up with a few short requests, then run the passes.

    Args:
        args: the parsed flags.
        generate: runs requests on the loaded model.
        packages: packages to report the versions of.
        config: further settings to report.
    """
    workload = read_workload(args.workload)
    generate([Request(request.prompt_ids[:64], 4) for request in workload[:4]])
    flags = {name: value for name, value in vars(args).items() if name not in _FILES}
    about = {"versions": versions(packages), "config": {**flags, **config}}
    if args.on_request:
        say({"ready": about})
        for _ in sys.stdin:
            say({"pass": _pass(generate, workload)})
        return
    for figures in _passes(generate, workload, args.passes):
        for name, value in figures.items():
            print(f"  {name:<20}  {value:,.4g}")
        print(json.dumps({**figures, **about}))


def _passes(
    generate: Generate, workload: Sequence[Request], number: int
) -> Iterator[dict[str, float]]:
    for _ in range(number):
        yield _pass(generate, workload)


def _pass(generate: Generate, workload: Sequence[Request]) -> dict[str, float]:
    start = time.monotonic()
    got = generate(workload)
    wall = time.monotonic() - start
    wanted = [request.num_output for request in workload]
    if list(got) != wanted:
        raise SystemExit(
            f"error: requested {wanted} tokens, got {list(got)}: the pass cannot be compared"
        )
    return {
        "output_tokens_per_s": sum(wanted) / wall,
        "requests_per_s": len(workload) / wall,
        "wall_s": wall,
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages and of Python."""
    return {
        **{name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
    }


def say(message: dict[str, Any]) -> None:
    """Print a message of the protocol."""
    print(PREFIX + json.dumps(message), flush=True)
