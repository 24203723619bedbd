"""Beside llama.cpp on GGUF files: both servers read one file and answer the same requests, one server at a time.

A round of a server measures, after a short request:

- decoding of N streams at once, tokens/s from each stream's first token on;
- prompts of P tokens, tokens/s until the first token;
- the next turn of a chat, milliseconds to the first token: each turn is the text so far, its answer and new
  words.

The servers take turns in being first. Prefix caches are on; only turns repeat text.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.peers.environment import Environment, default_folder, prepare_environment
from lab.peers.random_file import OTHERS, TYPES, random_file
from lab.peers.registry import PEERS
from lab.peers.results import machine, read_saved, save, stamp_of_now, without_places
from lab.peers.side import Side
from orca_jax.flags import add_number
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.tools.bench.online.closed_loop import Stream, read_stream
from orca_jax.tools.bench.online.exchange import exchange
from orca_jax.tools.bench.online.prompts import WORDS, RequestForm
from orca_jax.tools.bench.online.server import PATHS, address_of
from orca_jax.values.errors import ConfigError

SHORT = 16  # tokens of the prompts of streams
FIRST_WORDS = 280
NEW_WORDS = 18  # of a later turn
ANSWER = 40  # tokens
LOWEST_ID = 256  # of random prompts: below are single bytes
SLOTS, MOST_PROMPT = 32, 16_384
_TIMEOUT = 1800.0  # seconds, of a start and of a request

type Figures = dict[str, float]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "--files", nargs="+", default=list(TYPES), metavar="FILE",
        help=f"GGUF files; types of a random Llama of 594 million parameters; or {', '.join(OTHERS)} (default: "
        f"{' '.join(TYPES)})",
    )  # fmt: skip
    meaning = f"requests that generate at once, at most {SLOTS}"
    add_number(parser, "--streams", [1, 8, 32], meaning, nargs="*")
    add_number(parser, "--prompts", [512, 4096], "tokens of prompts", nargs="*")
    add_number(parser, "--turns", 8, "turns of a chat with files of words; 0: none")
    add_number(parser, "--rounds", 3, "rounds of each server")
    add_number(parser, "--num-output", 96, "tokens of a stream")
    parser.add_argument("--save", metavar="FILE", help="add the results to the JSON of a file")
    parser.add_argument(
        "engine_flags", nargs="*", metavar="-- FLAG", help="further flags of our engine"
    )


def run(args: argparse.Namespace) -> None:
    """Measure all files; print a table and a line of JSON.

    Raises:
        ConfigError: a flag is wrong, or a file does not exist.
        OrcaError: a server failed.
    """
    _check(args)
    results: dict[str, Any] = {"files": {}} | read_saved(args.save, ("files",), ("files",))
    peer = PEERS["llama.cpp"]
    folder = default_folder("llama.cpp")
    environment = Environment("llama.cpp", peer, folder, prepare_environment(peer, folder))
    for word in args.files:
        path = Path(word)
        if word in (*TYPES, *OTHERS):
            path = random_file(word, folder.parent / "files", folder / "bin" / "llama-quantize")
        # the text of random models has no words
        turns = 0 if word in (*TYPES, *OTHERS) else args.turns
        figures, sides = _pair(args, path, environment, turns)
        results |= {"hardware": machine(), "sides": without_places(sides)}
        name = " ".join((path.stem, *args.engine_flags))
        results["files"][name] = {**figures, **stamp_of_now()}
        print_table(name, {figure: shown_ratio(each) for figure, each in figures["ratios"].items()})
        if args.save is not None:
            save(results, args.save)
    print(json.dumps(results))


def _check(args: argparse.Namespace) -> None:
    for name, least in {"rounds": 1, "num_output": 2}.items():
        if getattr(args, name) < least:
            raise ConfigError(
                f"{name} must be at least {least}, got {getattr(args, name)}", param=name
            )
    for name, most in {"streams": SLOTS, "prompts": MOST_PROMPT}.items():
        if not all(1 <= number <= most for number in getattr(args, name)):
            raise ConfigError(
                f"{name} must be from 1 to {most}, got {getattr(args, name)}", param=name
            )
    for word in args.files:
        if word not in (*TYPES, *OTHERS) and not Path(word).is_file():
            raise ConfigError(
                f"files: {word!r} is not a GGUF file or one of {', '.join((*TYPES, *OTHERS))}",
                param="files",
            )


def _pair(
    args: argparse.Namespace, path: Path, environment: Environment, turns: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Start both servers on a file, and run the rounds. Returns the figures, and what the servers say."""
    length = max([*args.prompts, 1024]) + 1024
    common = ["--threads", "2", "--max-num-seqs", str(SLOTS), "--model", str(path)]
    flags = ["--max-model-len", str(length)]
    own = [
        *(sys.executable, "-m", "lab.peers.own_server", *common, "--served-model-name", "model"),
        *("--enable-prefix-caching", *flags, *args.engine_flags),
    ]
    theirs = [
        *environment.command(environment.peer.server, 2),
        *common,
        "--context",
        str(SLOTS * 512 + length),
    ]
    found: dict[str, list[Figures]] = {"own": [], "peer": []}
    begin = time.monotonic()
    with Side("the server of orca-jax", own, _TIMEOUT) as first:
        urls = {"own": first.about()["url"]}
        own_start = time.monotonic() - begin
        begin = time.monotonic()
        with Side("the server of llama.cpp", theirs, _TIMEOUT) as second:
            about_peer = second.about()
            peer_start = time.monotonic() - begin
            urls["peer"] = about_peer["url"]
            for number in range(args.rounds):
                for name in ("own", "peer") if number % 2 == 0 else ("peer", "own"):
                    found[name].append(measure_round(urls[name], args, turns, number))
                    print(f"{path.stem} {name}: {found[name][-1]}", file=sys.stderr)
    figures = {"start_s": [own_start, peer_start], "read_gb_per_s": read_rate(), "rounds": found}
    sides = {
        "llama.cpp": {
            "versions": {"llama.cpp": about_peer["version"]},
            "config": {"flags": about_peer["flags"]},
        },
        "own": {
            "hardware": hardware(),
            "config": {"flags": ["--max-num-seqs", str(SLOTS), *flags]},
        },
    }
    return {**figures, "ratios": ratios_of(found)}, sides


def ratios_of(found: Mapping[str, Sequence[Figures]]) -> dict[str, list[float]]:
    """Return least, median and most of ours to the peer's for each figure, as speeds: above 1 ours is the faster."""
    ratios = {}
    for name in found["own"][0]:
        pairs = [
            own[name] / peer[name] for own, peer in zip(found["own"], found["peer"], strict=True)
        ]
        speeds = [1 / ratio for ratio in pairs] if name.endswith("_ms") else pairs
        ratios[name] = [min(speeds), statistics.median(speeds), max(speeds)]
    return ratios


def shown_ratio(ratio: Sequence[float]) -> str:
    """Return a ratio with its range."""
    least, middle, most = ratio
    return f"{middle:.2f} ({least:.2f} to {most:.2f})"


def measure_round(url: str, args: argparse.Namespace, turns: int, seed: int) -> Figures:
    """Return the figures of one server, with prompts drawn by the seed."""
    source = random.Random(seed)

    def ids(number: int) -> list[int]:
        return source.choices(range(LOWEST_ID, 24_000), k=number)

    client = _Client(url)
    client.ask([ids(SHORT)], 8)
    figures = {}
    for number in args.streams:
        streams = client.ask([ids(SHORT) for _ in range(number)], args.num_output)
        figures[f"streams_{number}"] = sum(
            (args.num_output - 1) / (one.times[-1] - one.times[0]) for one in streams
        )
    for number in args.prompts:
        begin = time.monotonic()
        (one,) = client.ask([ids(number)], 2)
        figures[f"prompt_{number}"] = number / (one.times[0] - begin)
    if turns > 1:
        figures["next_turn_ms"] = 1e3 * _turns(client, source, turns)
    return figures


def _turns(client: "_Client", source: random.Random, number: int) -> float:
    """Return the median seconds to the first token of the turns after the first."""
    text = " ".join(source.choices(WORDS, k=FIRST_WORDS))
    times = []
    for _ in range(number):
        begin = time.monotonic()
        (one,) = client.ask([text], ANSWER)
        times.append(one.times[0] - begin)
        text += "".join(one.texts) + " " + " ".join(source.choices(WORDS, k=NEW_WORDS))
    return statistics.median(times[1:])


class _Client:
    """Requests to one server, greedy and without an end token."""

    def __init__(self, url: str) -> None:
        self._form = RequestForm(url, PATHS["completions"], "model", has_usage=False)
        self._address = address_of(url)

    def ask(self, prompts: Sequence[Sequence[int] | str], num_output: int) -> list[Stream]:
        """Send all prompts at once, ids or texts; return their streams. Raises OrcaError."""
        forms = [dataclasses.replace(self._form, extra={"prompt": prompt}) for prompt in prompts]

        async def load() -> list[Stream]:
            sent = [
                exchange(self._address, form.encode((), num_output), time.monotonic(), _TIMEOUT)
                for form in forms
            ]
            return [read_stream(call) for call in await asyncio.gather(*sent)]

        return asyncio.run(load())


def read_rate() -> float:
    """Return the rate at which two threads read memory, in GB/s; the best of three."""
    import numpy as np

    part = np.ones(1 << 28, np.int8)

    def once(pool: ThreadPoolExecutor) -> float:
        begin = time.monotonic()
        list(pool.map(np.max, np.array_split(part, 2)))
        return part.nbytes / (time.monotonic() - begin) / 1e9

    with ThreadPoolExecutor(2) as pool:
        return max(once(pool) for _ in range(3))
