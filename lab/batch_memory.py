"""Measure the peak memory of batch runs of different lengths on the toy model, each in its own process."""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from orca_jax.assembly.choices import TOY
from orca_jax.flags import add_number
from orca_jax.helpers.processor import cpu_name
from orca_jax.helpers.reporting import print_table
from orca_jax.values.errors import ConfigError, EngineError

POLL_SECONDS = 0.1
# so few that all runs fill the prefix cache, which has about a kilobyte of the host for each page
NUM_PAGES = 2048


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_number(parser, "--rows", [10_000, 100_000], "rows of each run", nargs="+")
    parser.add_argument(
        "--order",
        choices=("input", "finished"),
        default="input",
        help="order of the output (default: input)",
    )


def run(args: argparse.Namespace) -> None:
    """Measure each length; print tables and a line of JSON."""
    if min(args.rows) < 1:
        raise ConfigError(f"rows must be at least 1, got {min(args.rows)}", param="rows")
    runs = []
    for num_rows in args.rows:
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            runs.append(_measure(Path(folder), num_rows, args.order))
        print_table(f"{num_rows:,} rows", runs[-1])
    print(json.dumps({"runs": runs, "order": args.order, "cpu": cpu_name()}))


def _measure(folder: Path, num_rows: int, order: str) -> dict[str, float]:
    source = folder / "in.jsonl"
    output = folder / "out.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            body = {
                "model": TOY,
                "prompt": f"p {number}",
                "max_tokens": 1 + number % 4,
                "temperature": 0,
            }
            row = {
                "custom_id": f"row-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": body,
            }
            file.write(json.dumps(row) + "\n")
    command = [
        sys.executable,
        "-m",
        "orca_jax.batch",
        "-i",
        str(source),
        "-o",
        str(output),
        "--model",
        TOY,
    ]
    command += ["--order", order, "--num-pages", str(NUM_PAGES)]
    start = time.monotonic()
    peak = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, _peak_mib(process.pid))
            time.sleep(POLL_SECONDS)
    wall = time.monotonic() - start
    with output.open("rb") as file:
        written = sum(1 for _ in file)
    if process.returncode or written != num_rows:
        raise EngineError(
            f"{written} of {num_rows} rows were written; exit code {process.returncode}"
        )
    return {"rows": num_rows, "peak_mib": peak, "wall_s": wall, "rows_per_s": num_rows / wall}


def _peak_mib(pid: int) -> float:
    """Return the peak memory of a process so far, or 0 if it is just ending.

    `getrusage` cannot be used: its peak of a child includes the memory of the parent at the fork.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    return int(found[1]) / 1024 if found else 0.0
