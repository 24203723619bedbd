"""The launcher and the benchmark of messages, each with real processes on this machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from orca_jax.cluster import launch
from orca_jax.cluster.keys import ClusterKeys, make_key_file, read_keys


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
        workers = [
            one
            for one in psutil.Process(process.pid).children()
            if "--node-rank=1" in one.cmdline()
        ]
        os.kill(workers[0].pid, signal.SIGKILL)
        assert process.wait(60) == 128 + signal.SIGKILL


class Started:
    """A process that ends at once; it keeps its command, and the keys that it could read."""

    commands: ClassVar[list[list[str]]] = []
    keys: ClassVar[list[ClusterKeys]] = []

    def __init__(self, command: list[str], **options: object) -> None:
        self.commands.append(command)
        (path,) = [
            flag.partition("=")[2] for flag in command if flag.startswith("--cluster-key-file=")
        ]
        self.keys.append(read_keys(Path(path)))

    def wait(self) -> int:
        return 0

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("given", [False, True])
def test_a_launch_makes_keys_that_are_removed_at_its_end(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.subprocess, "Popen", Started)
    monkeypatch.setattr(Started, "commands", [])
    monkeypatch.setattr(Started, "keys", [])
    make_key_file(own := tmp_path / "own.key")
    assert (
        launch.launch(2, ["--model", "m", *([f"--cluster-key-file={own}"] if given else [])]) == 0
    )
    assert len(Started.keys) == 2 and len({keys.leader for keys in Started.keys}) == 1
    (path,) = {
        flag.partition("=")[2]
        for command in Started.commands
        for flag in command
        if "key-file=" in flag
    }
    assert Path(path).exists() is given and (path == str(own)) is given


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
