"""Processes of a server for the soak: started without the bound on failures, watched, and killed."""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from orca_jax.cluster.keys import make_key_file
from orca_jax.cluster.launch import free_ports

_START = 60.0  # seconds for one process to serve
_UNBOUND = """
import sys
from orca_jax.link.restarts import bound
bound.MAX_FAILURES = 10**9
bound.LONGEST_PAUSE = bound.FIRST_PAUSE
from orca_jax.serve.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


_COMMAND = [sys.executable, "-c", _UNBOUND]


@dataclass(frozen=True)
class Served:
    """A server that is started again after each kill."""

    url: str
    process: subprocess.Popen[str]

    def state(self, http: httpx.Client) -> dict[str, Any]:
        """The answer of `/health`."""
        found: dict[str, Any] = http.get("/health").json()
        return found

    def wait_ready(self, http: httpx.Client) -> None:
        """Wait until an engine serves. Raises TimeoutError."""
        limit = time.monotonic() + _START
        while self.state(http)["status"] != "ready":
            if time.monotonic() > limit:
                raise TimeoutError(f"no engine serves within {_START:g} s")
            time.sleep(0.005)

    def engine(self) -> psutil.Process:
        """The engine process, as soon as there is one. Raises TimeoutError."""
        return child_of(psutil.Process(self.process.pid), "orca_jax.link.process")

    def restarts(self, http: httpx.Client) -> int:
        """Restarts that the server has counted."""
        found = re.search(
            r"^orca_jax_engine_restarts_total ([\d.]+)", http.get("/metrics").text, re.M
        )
        assert found is not None, "the server has no counter of restarts"
        return int(float(found[1]))


def child_of(parent: psutil.Process, word: str | None = None) -> psutil.Process:
    """The child process whose command line has a word, as soon as there is one. Raises TimeoutError."""
    limit = time.monotonic() + _START
    while time.monotonic() < limit:
        for child in parent.children():
            # it may have just ended
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if word is None or word in child.cmdline():
                    return child
        time.sleep(0.005)
    raise TimeoutError(f"no process starts within {_START:g} s")


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[Served]:
    """A server whose engines may end as often as they like."""
    process = subprocess.Popen(
        [*_COMMAND, "--port", "0", "--no-log-requests", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        found = re.search(r"https?://\S+$", process.stdout.readline().rstrip())
        assert found is not None, "the server did not start"
        yield Served(found[0], process)
        process.terminate()
        process.wait(_START)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def followed(nodes: int, *flags: str) -> Iterator[tuple[Served, list[psutil.Process]]]:
    """A server over several processes of this machine, and the parents of its workers."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        key = Path(folder) / "key"
        make_key_file(key)
        shared = ("--nnodes", str(nodes), "--master-port", str(free_ports()), "--restart-workers",
                  "--cluster-key-file", str(key), "--control-timeout", "2", *flags)  # fmt: skip
        workers = [_worker(*shared, "--node-rank", str(rank)) for rank in range(1, nodes)]
        for worker in workers:
            stack.callback(worker.wait, _START)
        try:
            with serving(*shared) as served:
                yield served, [psutil.Process(worker.pid) for worker in workers]
        except BaseException:
            for worker in workers:
                worker.kill()
            raise


def _worker(*flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*_COMMAND, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
