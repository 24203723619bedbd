"""Our side of a comparison: `python -m lab.peers.own`, started by `python -m lab peers`.

It follows the protocol of `lab/peers/programs/common.py`, as the programs of the peers do.
"""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from lab.peers.inputs import read_workload
from lab.peers.side import PREFIX
from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.flags import FlagParser, add_engine_args, engine_config_from_args
from orca_jax.helpers.reporting import hardware
from orca_jax.tools.bench.measure import run_workload, summarize, warm_up
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.errors import OrcaError


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model, and run a pass for each line of standard input."""
    parser = FlagParser(prog="python -m lab.peers.own", description=__doc__)
    parser.add_argument(
        "--workload", required=True, metavar="FILE", help="workload.json of --write"
    )
    parser.add_argument("--threads", type=int, required=True, metavar="N", help="processors to use")
    # All passes have the same prompts, so with prefix caching later ones would find most of them in the cache.
    add_engine_args(parser, enable_prefix_caching=False, progress=False)
    args = parser.parse_args(argv)
    use_processors(args.threads)
    try:
        engine = engine_config_from_args(args)
        with build_engine(engine) as built:
            config = {**asdict(engine), "threads": args.threads}
            del config["model"]  # a folder of this run
            about = {"hardware": hardware(), "config": config}
            run_passes(built, read_workload(Path(args.workload)), about, sys.stdin, sys.stdout)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run_passes(
    built: Built,
    workload: Sequence[WorkloadRequest],
    about: dict[str, Any],
    requests: Iterable[str],
    out: TextIO,
) -> None:
    """Warm up, then run a pass for each line of `requests`; each message is one line of `out`."""
    warm_up(built.engine, workload)
    _say(out, {"ready": about})
    for _ in requests:
        _say(out, {"pass": summarize(run_workload(built.engine, workload))})


def use_processors(number: int) -> None:
    """Keep this process on the first processors of those that it may use, as the programs of the peers do."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])


def _say(out: TextIO, message: dict[str, Any]) -> None:
    print(PREFIX + json.dumps(message), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
