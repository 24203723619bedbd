"""Runs a server for a client: starts it, waits until it is ready, stops it, and collects its faults."""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 600  # a model compiles first
STOP_SECONDS = 60

__all__ = ["Server", "serving"]


@dataclass
class Server:
    """A ready server. `faults` is filled at its end."""

    port: int
    faults: list[str] = field(default_factory=list)


@contextlib.contextmanager
def serving(root: Path, flags: Sequence[str], api_key: str) -> Iterator[Server]:
    """Run `python -m orca_jax.serve` while the block runs.

    Args:
        root: root of the project.
        flags: further flags.
        api_key: the accepted API key.

    Raises:
        SystemExit: the server did not become ready.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        keys = Path(folder) / "keys"
        keys.write_text(f"{api_key}\n", encoding="utf-8")
        keys.chmod(0o600)
        command = [
            sys.executable,
            "-m",
            "orca_jax.serve",
            "--port",
            "0",
            "--api-key-file",
            str(keys),
            *flags,
        ]
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=root, stdout=out, stderr=out)
        try:
            server = Server(wait_for_port(process, log))
            yield server
            server.faults += compiles(server.port, api_key)
            process.terminate()
            code = process.wait(STOP_SECONDS)
            text = log.read_text(encoding="utf-8", errors="replace")
            if code != 0:
                server.faults.append(f"the server ended with {code}: {text[-2000:]}")
            if "Traceback" in text:
                at = text.index("Traceback")
                server.faults.append(f"the server logged a traceback: {text[at : at + 3000]}")
            if api_key in text:
                server.faults.append("the server wrote its API key into the log")
        finally:
            process.kill()
            process.wait()


def wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait for the server's line with its address; returns the port. Raises SystemExit."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(
            r"^Serving .* on https?://\S+:(\d+)$", log.read_text(encoding="utf-8"), re.MULTILINE
        )
        if found:
            return int(found[1])
        time.sleep(0.1)
    raise SystemExit(
        f"error: the server did not become ready:\n{log.read_text(encoding='utf-8')[-3000:]}"
    )


def compiles(port: int, api_key: str) -> list[str]:
    """A fault if `/metrics` reports compilations while serving, or lacks their number."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"authorization": f"Bearer {api_key}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(r"^\S*compiles_while_serving_total(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    if found is None:
        return ["/metrics has no compiles_while_serving_total"]
    return [] if float(found[1]) == 0 else [f"{found[1]} compiles while serving"]
