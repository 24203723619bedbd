"""Measures the seconds from the command to the end of its help, for every subcommand of orca-jax.

    python -m lab.measured.help_times --repeat 5

prints a line for each subcommand with the median of the runs, their least, and the least time of the processor, which
depends less on other work of the machine; and one JSON object as the last line. Each run is a new process. The first
run of each command is not counted: it may write Python's cache of compiled modules.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.cli.main import SUBCOMMANDS
from orca_jax.flags import FlagParser
from orca_jax.helpers.processor import cpu_name
from orca_jax.tools.bench.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.3  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if the processor worked longer than the limit, else 0."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeat", type=int, default=5, metavar="N", help="runs of each command (default: 5)"
    )
    parser.add_argument(
        "--benchmarks", action="store_true", help="also measure the help of each benchmark"
    )
    args = parser.parse_args(argv)
    commands = [["--help"], *([name, "--help"] for name in SUBCOMMANDS)]
    commands += [["bench", name, "--help"] for name in COMMANDS] if args.benchmarks else []
    found = {}
    for words in commands:
        runs = found[" ".join(words)] = runs_of(words, max(1, args.repeat))
        shown = f"{statistics.median(runs.wall):6.2f} s  least {min(runs.wall):.2f} s  processor {min(runs.cpu):.2f} s"
        print(f"{shown}  orca-jax {' '.join(words)}", flush=True)
    worst = max(min(runs.cpu) for runs in found.values())
    line: dict[str, Any] = {
        "seconds": {words: runs._asdict() for words, runs in found.items()},
        "worst_cpu_s": worst,
    }
    line |= {"limit_s": LIMIT, "cpu": cpu_name()}
    print(json.dumps({**line, "load_average": os.getloadavg()[0]}))
    return 1 if worst > LIMIT else 0


class Runs(NamedTuple):
    """Seconds of each run of a command: elapsed, and of the processor."""

    wall: list[float]
    cpu: list[float]


def runs_of(words: Sequence[str], repeat: int) -> Runs:
    """Run a command of `orca-jax` once uncounted, and then `repeat` times."""
    command = [sys.executable, "-m", "orca_jax.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found = Runs([], [])
    for _ in range(repeat + 1):
        begun = time.monotonic()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.wall.append(round(time.monotonic() - begun, 3))
        found.cpu.append(round(now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime, 3))
    return Runs(found.wall[1:], found.cpu[1:])


if __name__ == "__main__":
    sys.exit(main())
