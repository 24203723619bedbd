"""Measures the seconds from the command to the end of its help, for every subcommand of orca-jax.

    python scripts/help_times.py --repeat 5

prints a line for each subcommand with the median and the least of the runs, and one JSON object as the last line. Each
run is a new process. The first run of each command is not counted: it may write Python's cache of compiled modules.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orca_jax.bench.__main__ import COMMANDS
from orca_jax.cli.main import SUBCOMMANDS
from orca_jax.flags import FlagParser
from orca_jax.processor import cpu_name

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.3  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if a least time is above the limit, else 0."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs of each command (default: 5)")
    parser.add_argument("--benchmarks", action="store_true", help="also measure the help of each benchmark")
    args = parser.parse_args(argv)
    commands = [["--help"], *([name, "--help"] for name in SUBCOMMANDS)]
    commands += [["bench", name, "--help"] for name in COMMANDS] if args.benchmarks else []
    found = {" ".join(words): seconds_of(words, max(1, args.repeat)) for words in commands}
    for words, seconds in found.items():
        print(f"{statistics.median(seconds):6.2f} s  least {min(seconds):.2f} s  orca-jax {words}")
    worst = max(min(seconds) for seconds in found.values())
    line = {"seconds": found, "worst_least_s": worst, "limit_s": LIMIT, "cpu": cpu_name()}
    print(json.dumps({**line, "load_average": os.getloadavg()[0]}))
    return 1 if worst > LIMIT else 0


def seconds_of(words: Sequence[str], repeat: int) -> list[float]:
    """Run a command of `orca-jax` once uncounted, and then `repeat` times. Returns the seconds of each run."""
    command = [sys.executable, "-m", "orca_jax.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found = []
    for _ in range(repeat + 1):
        begun = time.monotonic()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        found.append(round(time.monotonic() - begun, 3))
    return found[1:]


if __name__ == "__main__":
    sys.exit(main())
