"""Measure an installation from the source tree into a new environment, and the size of the wheel."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.values.errors import OrcaError

_TREE = Path(__file__).parents[1]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add no flag."""


def run(args: argparse.Namespace) -> None:
    """Measure once; print a table and a line of JSON."""
    found = measure_install()
    print_table("installation", found)
    print(json.dumps({**found, "hardware": hardware()}))


def measure_install(tree: Path = _TREE) -> dict[str, float]:
    """Install the source tree into a new environment, and build its wheel. The network is used.

    Returns:
        Seconds of `python -m venv` and of `pip install .`, with pip's cache as it was found, and the wheel's bytes.

    Raises:
        OrcaError: a command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "venv"
        wheels = Path(folder) / "wheels"
        pip = [str(place / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        venv_s = _timed([sys.executable, "-m", "venv", str(place)])
        install_s = _timed([*pip, "install", str(tree)])
        _timed([*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(tree)])
        (wheel,) = wheels.glob("*.whl")
        return {"venv_s": venv_s, "pip_install_s": install_s, "wheel_bytes": wheel.stat().st_size}


def _timed(command: Sequence[str]) -> float:
    """Run a command; return its seconds."""
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise OrcaError(f"{' '.join(command)} ended with code {done.returncode}: {last}")
    return time.monotonic() - begun
