"""Kill the engine of a server again and again under load, and compare each answer with that of a calm server.

The engine is a process with the toy model, in which the next token is computed from all tokens before it. So a token
that is missing, doubled or drawn by another key changes all that follow. Threads send calls of every kind. The engine
is killed by SIGKILL at a random moment after it serves. The bound on failures is lifted.
"""

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import httpx
import psutil

from lab.restarts.calls import KINDS, MODEL, Call, ask
from lab.restarts.server import Served, child_of, followed, serving
from orca_jax.flags import add_number
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.values.errors import ConfigError

_AT_ONCE = 8  # calls of a calm server
_SEEDS = 3  # of each kind of call
_TIMEOUT = 120.0  # seconds of a call
_FIRST_KILL = 0.02  # seconds after an engine serves; the last one is a flag
_TWICE = 0.2  # share of the kills that are followed by one of the next engine while it loads
_LOADING = 0.4  # seconds of such an engine, at most


@dataclass
class Load:
    """Threads that call a server, and what they have found.

    Attributes:
        url: of the server.
        expected: the answer of each call.
    """

    url: str
    expected: Mapping[Call, Any]
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    pause: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """Call until `over`, and compare."""
        draw = random.Random(number)
        calls = list(self.expected)
        with httpx.Client(base_url=self.url, timeout=_TIMEOUT) as http:
            while not self.over.is_set():
                self._call(http, draw.choice(calls))

    def _call(self, http: httpx.Client, call: Call) -> None:
        begun = time.monotonic()
        try:
            answer = ask(http, call)
        except httpx.HTTPError as error:
            self.problems.append(f"{call}: {error!r}")
            return
        if answer.status == 503:  # it came while no engine served
            self.ends["refused"] += 1
            time.sleep(0.05)
            return
        self.pause = max(self.pause, answer.pause)
        self.ends[call.kind] += 1
        self.ends["calls"] += 1
        if answer.status != 200 or answer.value != self.expected[call]:
            after = time.monotonic() - begun
            self.problems.append(f"{call}, {answer.status}, after {after:.1f} s: {answer.value!r}")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this soak."""
    add_number(parser, "--kills", 500, "engines to kill")
    add_number(
        parser, "--nodes", 1, "processes of the engine; workers are killed as often as the leader"
    )
    add_number(parser, "--threads", 12, "open calls")
    add_number(parser, "--longest", 1.0, "most seconds between a ready engine and its kill")
    add_number(parser, "--seed", 0, "of the moments")


def run(args: argparse.Namespace) -> int:
    """Print a table and a line of JSON. Return 1 if an answer differs.

    Raises:
        ConfigError: a number is too small.
    """
    if args.kills < 1 or args.threads < 1:
        raise ConfigError("kills and threads must be at least 1", param="kills")
    flags = ("--model", MODEL, "--max-num-batched-tokens", "128")
    begun = time.monotonic()
    with ExitStack() as stack:
        workers: list[psutil.Process] = []
        if args.nodes == 1:
            served = stack.enter_context(serving(*flags, "--restart-engine"))
        else:
            served, workers = stack.enter_context(followed(args.nodes, *flags))
        http = stack.enter_context(httpx.Client(base_url=served.url, timeout=_TIMEOUT))
        load = Load(served.url, expected_answers(http))
        interrupted = _kill_under_load(served, http, load, workers, args)
        restarts = served.restarts(http)
    row = {
        "nodes": args.nodes,
        "kills": args.kills,
        "restarts_counted": restarts,
        "calls": load.ends["calls"],
        "open_at_kills": interrupted,
        "refused_while_restarting": load.ends["refused"],
        "wrong": len(load.problems),
        "longest_pause_s": load.pause,
        "seconds": time.monotonic() - begun,
    }
    print_table("engines killed under load", row)
    kinds = {kind: load.ends[kind] for kind in KINDS}
    print(
        json.dumps({**row, "kinds": kinds, "problems": load.problems[:5], "hardware": hardware()})
    )
    return int(bool(load.problems))


def expected_answers(http: httpx.Client) -> dict[Call, Any]:
    """The answers of all calls, by a server whose engine stays.

    Raises:
        ConfigError: the server refuses a call.
    """
    calls = [Call(*place) for place in product(KINDS, range(_SEEDS), (False, True))]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return dict(zip(calls, threads.map(partial(_accepted, http), calls), strict=True))


def _accepted(http: httpx.Client, call: Call) -> Any:
    answer = ask(http, call)
    if answer.status != 200:
        raise ConfigError(f"{call} got {answer.status}: {answer.value}", param="model")
    return answer.value


def _kill_under_load(
    served: Served,
    http: httpx.Client,
    load: Load,
    workers: list[psutil.Process],
    args: argparse.Namespace,
) -> int:
    """Kill engines and workers while threads call; return the number of calls that were open at all kills."""
    draw = random.Random(args.seed)
    threads = [threading.Thread(target=load.run, args=(number,)) for number in range(args.threads)]
    for thread in threads:
        thread.start()
    interrupted = 0
    is_again = False  # the next kill meets an engine that loads
    try:
        for _ in range(args.kills):
            if not is_again:
                served.wait_ready(http)
                time.sleep(draw.uniform(_FIRST_KILL, args.longest))
            interrupted += http.get("/load").json()["server_load"]
            while not _kill_one(served, workers, draw, is_again):
                pass
            is_again = draw.random() < _TWICE
        served.wait_ready(http)
    finally:
        load.over.set()
        for thread in threads:
            thread.join()
    return interrupted


def _kill_one(
    served: Served, workers: list[psutil.Process], draw: random.Random, is_loading: bool
) -> bool:
    """Kill the engine or a worker; False if it has just ended with its cluster."""
    parent = draw.choice([None, *workers])
    victim = served.engine() if parent is None else child_of(parent)
    if is_loading:
        time.sleep(draw.uniform(0.0, _LOADING))
    try:
        victim.kill()
        victim.wait()
    except psutil.NoSuchProcess:
        return False
    return True
