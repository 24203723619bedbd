"""The launcher and the benchmark of messages, each with real processes on this machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest


@contextmanager
def launched(*flags: str) -> Iterator["subprocess.Popen[str]"]:
    """The launcher of two processes with the toy, after the leader has announced itself."""
    command = [sys.executable, "-m", "orca_jax.cluster", "launch", "--nnodes", "2", "--"]
    process = subprocess.Popen(
        [*command, "--model", "preset:toy", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert "Serving preset:toy" in process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        yield process
        process.wait(60)
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left, "a process of the cluster is left"


@pytest.mark.chaos
@pytest.mark.slow
def test_a_signal_ends_all_processes() -> None:
    with launched() as process:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.chaos
def test_the_status_is_that_of_the_first_failure() -> None:
    with launched() as process:
        workers = [one for one in psutil.Process(process.pid).children() if "--node-rank=1" in one.cmdline()]
        os.kill(workers[0].pid, signal.SIGKILL)
        assert process.wait(60) == 128 + signal.SIGKILL


@pytest.mark.parametrize("flags", [["--nnodes", "1"], []])
def test_a_launch_of_one_process_is_refused(flags: list[str]) -> None:
    command = [sys.executable, "-m", "orca_jax.cluster", "launch", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--nnodes" in done.stderr


@pytest.mark.slow
def test_the_benchmark_counts_the_messages() -> None:
    command = [sys.executable, "-m", "lab", "plan_messages", "--rows", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["rows"] == 4
    assert row["messages"] > 500, "one for each token, at least"
