"""Measure the start of a server, from the command to the first token, with an empty and a filled compile cache.

Each start is `python -m orca_jax.serve` in a new process. Flags after `--` are passed to it. The time begins with the
creation of the process, so unlike the times that the server reports it includes the start of Python. The system's file
cache is as it was found: the first start may read Python's files from the disk. Memory and processor time are those of
all processes of the server: before the first request, at most until then, and memory after `--requests` too.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from orca_jax.assembly.choices import is_toy
from orca_jax.flags import add_number
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.tools.bench.memory import processor_seconds, resident_bytes
from orca_jax.values.errors import ConfigError, OrcaError

POLL_SECONDS = 0.05  # between two calls of /health
NUM_OUTPUT = 96  # tokens of each of `--requests`
NAME = "measured"  # of the model in the API
OWN_FLAGS = (
    "--model",
    "--host",
    "--port",
    "--uds",
    "--compile-cache",
    "--served-model-name",
    "--config",
)
END_SECONDS = 30.0  # from SIGTERM to the end of a server


@dataclass(frozen=True)
class ServerStart:
    """One start. Times are seconds since the creation of the process, except for those that the server reports."""

    ready_s: float  # when /health answers with 200
    first_token_s: float
    load_average: float  # of the machine in the minute before
    programs: int
    from_cache: int
    phases: dict[str, float]  # seconds in each phase, reported by the server
    reported_s: float  # the server's own total
    processor_s: float = 0.0  # time of processors until then
    resident_gb: float = 0.0
    peak_gb: float = 0.0
    served_gb: float = 0.0  # resident after all requests


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", metavar="MODEL", help="model to serve (default: demo)")
    add_number(parser, "--repeat", 1, "starts of each kind; the medians are reported")
    add_number(parser, "--timeout", 1800.0, "longest time for a start", metavar="SECONDS")
    meaning = f"requests of {NUM_OUTPUT} tokens after a start, one after the other"
    add_number(parser, "--requests", 0, meaning)
    parser.add_argument(
        "server_flags",
        nargs="*",
        metavar="MODEL -- FLAG",
        help="the same as --model, and further flags of the server",
    )


def run(args: argparse.Namespace) -> None:
    """Measure all starts; print a table of medians and a line of JSON.

    Raises:
        ConfigError: a flag is wrong.
        OrcaError: a server did not start.
    """
    for name, least in {"repeat": 1, "requests": 0}.items():
        if getattr(args, name) < least:
            raise ConfigError(f"{name} must be at least {least}", param=name)
    if args.server_flags and not args.server_flags[0].startswith("-"):
        if args.model is not None:
            raise ConfigError(
                "model cannot be combined with the word MODEL; leave one of them out", param="model"
            )
        args.model = args.server_flags.pop(0)
    args.model = args.model or "demo"
    given = {flag.partition("=")[0] for flag in args.server_flags}
    for flag in OWN_FLAGS:
        if flag in given:
            raise ConfigError(
                f"{flag} is set by this benchmark; leave it out after --", param="server_flags"
            )
    cold = []
    warm = []
    sizes = []
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(
                measure_start(args.model, cache, args.server_flags, args.timeout, args.requests)
            )
            sizes.append(size_of(Path(cache)))
            warm.append(
                measure_start(args.model, cache, args.server_flags, args.timeout, args.requests)
            )
    result = {"cold": medians(cold), "warm": medians(warm)}
    for kind, figures in result.items():
        print_table(f"{args.model}, {kind} start, medians of {args.repeat}", _flat(figures))
    others = {"cache_bytes": statistics.median(sizes)}
    print_table("sizes", others)
    config = {name: getattr(args, name) for name in ("model", "repeat", "requests", "server_flags")}
    starts = {"cold": [asdict(start) for start in cold], "warm": [asdict(start) for start in warm]}
    print(
        json.dumps({**result, **others, "starts": starts, "hardware": hardware(), "config": config})
    )


def _send(http: httpx.Client, requests: int) -> None:
    for number in range(requests):
        _request(http, number)


def measure_start(
    model: str, cache: str, flags: Sequence[str], timeout: float, requests: int = 0
) -> ServerStart:
    """Start a server, generate a token, send further requests, and end the server.

    Raises:
        OrcaError: the server ended, or was not ready in time.
    """
    port = _free_port()
    own = ["--model", model, "--port", str(port), "--served-model-name", NAME]
    if not is_toy(model):  # toys have no programs
        own += ["--compile-cache", cache]
    command = [sys.executable, "-m", "orca_jax.serve", *flags, *own]
    load = os.getloadavg()[0]
    # A file, not a pipe: a full pipe would stop the server.
    with (
        tempfile.TemporaryFile("w+") as log,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        begun = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, text=True) as process:
            try:
                _wait_until_ready(process, http, begun + timeout)
                ready = time.monotonic()
                processor = processor_seconds(process.pid)
                resident, peak = (resident_bytes(process.pid, most=most) for most in (False, True))
                before = time.monotonic()
                _first_token(http)
                first = ready + time.monotonic() - before
                start = http.get("/ready").json()["engine"]["start"]
                _send(http, requests)
                served = resident_bytes(process.pid)
            except (httpx.HTTPError, LookupError, TimeoutError, ValueError) as error:
                raise OrcaError(
                    f"the server did not start: {error}; its log ends with: {_last_line(log)}"
                ) from None
            finally:
                _end(process)
    return ServerStart(
        ready_s=ready - begun,
        first_token_s=first - begun,
        load_average=load,
        programs=start["programs"],
        from_cache=start["from_cache"],
        phases=start["seconds"],
        reported_s=start["total"],
        processor_s=processor,
        resident_gb=resident / 1e9,
        peak_gb=peak / 1e9,
        served_gb=served / 1e9,
    )


def medians(starts: Sequence[ServerStart]) -> dict[str, Any]:
    """Return the median of each figure."""
    records = [asdict(start) for start in starts]
    phases = [record.pop("phases") for record in records]
    return {**_medians(records), "phases": _medians(phases)}


def _medians(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found = {}
    for name in records[0]:
        found[name] = statistics.median([record[name] for record in records])
    return found


def size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _wait_until_ready(
    process: "subprocess.Popen[str]", http: httpx.Client, deadline: float
) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise TimeoutError(f"exit code {process.returncode}")
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        time.sleep(POLL_SECONDS)
    raise TimeoutError("it was not ready in time; raise --timeout")


def _first_token(http: httpx.Client) -> None:
    """Read a stream of one token up to its first event."""
    body = {
        "model": NAME,
        "prompt": "Once upon a time",
        "max_tokens": 1,
        "stream": True,
        "ignore_eos": True,
    }
    with http.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and json.loads(line.removeprefix("data: "))["choices"]:
                return
    raise LookupError("a completion without a token")


def _request(http: httpx.Client, number: int) -> None:
    """Send a request whose prompt no other one has, and wait for its answer."""
    body = {
        "model": NAME,
        "prompt": f"{number} things that I like:",
        "max_tokens": NUM_OUTPUT,
        "ignore_eos": True,
    }
    http.post("/v1/completions", json=body).raise_for_status()


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_line(log: Any) -> str:
    log.seek(0)
    lines = log.read().strip().splitlines()
    if lines:
        return lines[-1]
    return "nothing"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _flat(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures with those of the phases among them, for a table."""
    phases = {f"{name}_s": seconds for name, seconds in figures["phases"].items()}
    return {name: value for name, value in figures.items() if name != "phases"} | phases
