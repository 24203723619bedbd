"""Starts all processes of a cluster on this machine, for trials and tests."""

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from orca_jax.cluster.keys import make_key_file
from orca_jax.cluster.sockets import NUM_PORTS

GRACE_SECONDS = 15.0  # for the other processes, after the end of one
_TRIALS = 100
_KEY_FLAG = "--cluster-key-file"


def launch(nnodes: int, flags: Sequence[str]) -> int:
    """Run `python -m orca_jax.serve` once for each rank until all have ended.

    Without --cluster-key-file they get a file with new keys, which is removed at the end. SIGINT and SIGTERM are
    forwarded. After the end of one process the others have some seconds to end by themselves.

    Returns:
        The exit status of the first process that has failed, or 0.
    """
    port = free_ports()
    own = [f"--nnodes={nnodes}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    with tempfile.TemporaryDirectory(prefix="orca-jax-") as folder, _forwarded() as processes:
        path = Path(folder, "cluster.key")
        if not any(flag.partition("=")[0] == _KEY_FLAG for flag in flags):
            make_key_file(path)
            own.append(f"{_KEY_FLAG}={path}")
        command = [sys.executable, "-m", "orca_jax.serve", *flags, *own]
        for rank in range(nnodes):
            processes.append(
                subprocess.Popen([*command, f"--node-rank={rank}"], start_new_session=True)
            )
        return _wait(processes)


def free_ports(number: int = NUM_PORTS, host: str = "127.0.0.1") -> int:
    """The first of some adjacent ports of an address of this host that are free."""
    for _ in range(_TRIALS):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = 0
            for offset in range(number):
                bound = stack.enter_context(
                    socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
                )
                bound.bind((host, first + offset if first else 0))
                first = first or bound.getsockname()[1]
            return first
    raise OSError("there are no adjacent free ports")


@contextlib.contextmanager
def _forwarded() -> "Iterator[list[subprocess.Popen[bytes]]]":
    """A list of processes that get the signals of this one. At the end those left are killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield processes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: "list[subprocess.Popen[bytes]]") -> int:
    """Wait for all processes; after the end of one, only as long as the others may take."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    for process in processes:
        threading.Thread(target=lambda each=process: ended.put(each.wait()), daemon=True).start()
    statuses = [ended.get()]
    deadline = time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(queue.Empty):
        while len(statuses) < len(processes):
            statuses.append(ended.get(timeout=max(0.0, deadline - time.monotonic())))
    return next((128 - status if status < 0 else status for status in statuses if status), 0)
