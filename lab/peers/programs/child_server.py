"""Runs the server of a peer as a child process: start, wait until it answers, end."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from lab.peers.programs.common import say

START_SECONDS = 900
_END_SECONDS = 15


@contextlib.contextmanager
def serving(command: Sequence[str], port: int, path: str) -> Iterator[None]:
    """Start a server and wait until it answers a path; end all its processes at the end."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + START_SECONDS
            while not _answers(port, path):
                if process.poll() is not None:
                    code = process.returncode
                    raise SystemExit(
                        f"error: the server ended with code {code} before it answered: {_fault(log)}"
                    )
                if time.monotonic() > end:
                    raise SystemExit(
                        f"error: the server did not answer in {START_SECONDS} seconds: {_fault(log)}"
                    )
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _fault(log: TextIO) -> str:
    """Return the last line of a log that names an error, or else the last one."""
    log.seek(0)
    lines = [line.strip() for line in log if line.strip()] or ["no output"]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])


def serve(port: int, command: Sequence[str], about: dict[str, Any]) -> None:
    """Run an OpenAI-compatible server until the end of standard input; report its address when it answers."""
    with serving(command, port, "/v1/models"):
        say({"ready": {"url": f"http://127.0.0.1:{port}", **about}})
        for _ in sys.stdin:
            pass


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
