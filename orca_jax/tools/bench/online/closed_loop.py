"""A closed loop of streaming clients: tokens per second, front-end time per token, and token age.

All clients begin at once, and each has one stream.

The model is `preset:clock-<ms>`, and its text holds the time of its generation (`sim/clock.py`). The front end has a
core of its own; engine and clients share the others. The age of a token at the client includes the rest of the engine's
loop over the batch, the socket between the processes, the front end, HTTP, and the queue of the client. So it is an
upper bound of the delay by the front end. If the pace is faster than the front end, ages grow: then a pass measures
throughput, and a slower one measures latency.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from orca_jax.flags.needs import check_needs
from orca_jax.helpers.reporting import hardware, percentile, print_table
from orca_jax.sim.clock import CLOCK_PREFIX, NUM_DIGITS, age_of
from orca_jax.tools.bench.online.answers import events, read_body
from orca_jax.tools.bench.online.exchange import Exchange, exchange
from orca_jax.tools.bench.online.prompts import RequestForm
from orca_jax.tools.bench.online.server import PATHS, address_of
from orca_jax.values.errors import ConfigError, OrcaError

CLIENTS = 1000
TOKENS = 400
PACES = (1, 100)  # milliseconds per iteration
SAMPLE_SECONDS = 0.1  # between samples of processor time
LONGEST_SECONDS = 86_400.0  # of a stream
# 48 tokens: a multiple of the groups of the clock
PROMPT = "All work and no play makes Jack a dull boy. 40. "

_PROC = Path("/proc")


@dataclass(frozen=True)
class Stream:
    """One answer: the times (seconds, monotonic) and texts of its events, and its finish reason."""

    times: Sequence[float]
    texts: Sequence[str]
    finish_reason: str | None

    def ages(self) -> Iterator[tuple[float, float]]:
        """Yield for each group of the clock model the time of its first byte, and its age then, both in seconds."""
        ends = list(itertools.accumulate(map(len, self.texts)))
        text = "".join(self.texts)
        at = text.find(" ")
        while 0 <= at < len(text) - NUM_DIGITS:
            seen = self.times[bisect_left(ends, at + 1)]
            yield seen, age_of(text[at + 1 : at + 1 + NUM_DIGITS], seen)
            at = text.find(" ", at + 1)


@dataclass(frozen=True)
class Target:
    """A server. `front_end` and `engine` are process ids, or 0 for a server started elsewhere."""

    url: str
    model: str
    front_end: int = 0
    engine: int = 0


@dataclass
class Clocks:
    """Samples of the processor seconds used by front end, engine and clients."""

    target: Target
    samples: list[tuple[float, float, float, float]] = field(default_factory=list)

    def look(self) -> None:
        """Take one sample."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        used = (
            cpu_seconds(self.target.front_end),
            cpu_seconds(self.target.engine),
            own.ru_utime + own.ru_stime,
        )
        self.samples.append((time.monotonic(), *used))

    async def keep_looking(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(SAMPLE_SECONDS)


def run(args: argparse.Namespace) -> None:
    """Run every pass; print a table for each and a line of JSON."""
    args.clients = CLIENTS if args.clients is None else args.clients
    args.tokens = TOKENS if args.tokens is None else args.tokens
    if args.clients < 1 or args.tokens < 16:
        raise ConfigError("clients must be at least 1, and tokens at least 16", param="clients")
    check_needs(
        "bench online, closed loop",
        args,
        {name for name in ("base_url", "model") if getattr(args, name)},
    )
    args.pace = args.pace or list(PACES)
    passes = []
    if args.base_url is not None:
        passes.append(_measure(Target(args.base_url.rstrip("/"), args.model), args))
    for pace in () if args.base_url is not None else args.pace:
        with _serving(f"{CLOCK_PREFIX}{pace}", args) as target:
            passes.append(_measure(target, args))
    config = {
        name: getattr(args, name)
        for name in ("clients", "tokens", "pace", "base_url", "server_flags")
    }
    print(json.dumps({"passes": passes, "hardware": hardware(), "config": config}))


def _measure(target: Target, args: argparse.Namespace) -> dict[str, float | str]:
    path = urlsplit(target.url).path + PATHS["completions"]
    form = RequestForm(target.url, path, target.model, has_usage=False, extra={"prompt": PROMPT})
    request = form.encode((), args.tokens)
    address = address_of(target.url)
    clocks = Clocks(target)

    async def load() -> list[Exchange]:
        looking = asyncio.create_task(clocks.keep_looking())
        begin = time.monotonic()
        try:
            return await asyncio.gather(
                *(exchange(address, request, begin, LONGEST_SECONDS) for _ in range(args.clients))
            )
        finally:
            looking.cancel()

    streams = [read_stream(call) for call in asyncio.run(load())]
    clocks.look()
    if any(stream.finish_reason != "length" for stream in streams):
        raise OrcaError("a stream ended before its last token")
    result = summarize(streams, clocks)
    print_table(f"{target.model}, {args.clients} streams of {args.tokens} tokens", result)
    return {"model": target.model, **result}


def read_stream(call: Exchange) -> Stream:
    """Parse the answer of one client.

    Raises:
        OrcaError: it is not a complete stream of events.
    """
    status, body, fault = read_body(call)
    if call.failure or status != 200:
        text = b"".join(data for _, data in body).decode(errors="replace")
        raise OrcaError(
            f"the server answered {status or 'nothing'}: {call.detail or fault or text[:300]}"
        )
    times = list[float]()
    texts = list[str]()
    reason = None
    for moment, data in events(body):
        if data == b"[DONE]":
            return Stream(times, texts, reason)
        value = json.loads(data)
        if "error" in value:
            raise OrcaError(f"a stream ended with an error: {value['error']['message']}")
        (choice,) = value["choices"]
        times.append(moment)
        texts.append(choice["text"])
        reason = choice["finish_reason"] or reason
    raise OrcaError("a stream ended without [DONE]")


def summarize(streams: Sequence[Stream], clocks: Clocks) -> dict[str, float]:
    """Compute the figures of the steady part, from the begin of the last stream to the end of the first one.

    Raises:
        OrcaError: the steady part is too short.
    """
    start = max(stream.times[0] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    steady = [sample for sample in clocks.samples if start <= sample[0] <= end]
    if len(steady) < 2:
        raise OrcaError("the streams did not overlap for long enough; raise --tokens or --pace")
    start = steady[0][0]
    end = steady[-1][0]
    tokens = 0
    reads = 0
    ages: list[float] = []
    for stream in streams:
        times = [at for at in stream.times if start < at <= end]
        reads += len(set(times))
        for at, text in zip(stream.times, stream.texts, strict=True):
            if start < at <= end:
                tokens += len(text)
        ages += [1e3 * age for at, age in stream.ages() if start < at <= end]
    front_end, engine, client = (
        after - before for before, after in zip(steady[0][1:], steady[-1][1:], strict=True)
    )
    result = {
        "tokens_per_s": tokens / (end - start),
        "reads_per_s": reads / (end - start),  # fewer than tokens if the front end joins several
        "clients_us_per_token": 1e6 * client / tokens,
        "steady_s": end - start,
    }
    if front_end:
        result["tokens_per_s_of_front_end_time"] = tokens / front_end
        result["front_end_us_per_token"] = 1e6 * front_end / tokens
        result["front_end_busy"] = front_end / (end - start)
        result["engine_us_per_token"] = 1e6 * engine / tokens
    if ages:
        result["p50_age_ms"] = percentile(ages, 50)
        result["p99_age_ms"] = percentile(ages, 99)
    return result


@contextlib.contextmanager
def _serving(model: str, args: argparse.Namespace) -> Iterator[Target]:
    """Start a server on a free port, with the front end alone on the first core."""
    flags = [
        "--model",
        model,
        "--port",
        "0",
        "--max-num-seqs",
        str(args.clients),
        "--max-model-len",
        "4096",
    ]
    command = [sys.executable, "-m", "orca_jax.serve", *flags, *args.server_flags]
    allowed = set(cores())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise OrcaError(
                    f"the server did not start; run it alone to see the error: {' '.join(command)}"
                )
            engine = max(children(process.pid), key=cpu_seconds, default=0)
            first, *others = cores()
            if others and engine:
                pin(process.pid, {first})
                pin(engine, set(others))
                pin(os.getpid(), set(others))
            yield Target(found[0], model, process.pid, engine)
        finally:
            pin(os.getpid(), allowed)
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far, in steps of 10 ms, or 0 if it is unknown."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    lists = (_PROC / str(pid) / "task").glob("*/children")
    found: list[int] = []
    for path in lists:
        found += map(int, path.read_text().split())
    return found


def pin(pid: int, cores: set[int]) -> None:
    """Restrict all threads of a process to some cores, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        for task in (_PROC / str(pid) / "task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


def cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
