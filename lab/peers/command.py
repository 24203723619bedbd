"""Compare with other engines on this machine, on the same weights and the same requests.

Offline, both sides are processes with a loaded model; each round runs a pass of both, and they take turns in being
first. Online, servers take the same requests from one open-loop client, one server at a time. The environment of a peer
is made at its first use. This needs the network and a Python for its packages. Flags after `--` are passed to
our engine.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from lab.peers.environment import Environment, default_folder, prepare_environment, program_of
from lab.peers.inputs import write_inputs
from lab.peers.offline import run_offline
from lab.peers.registry import CLIENTS, PEERS, UNAVAILABLE, Peer
from lab.peers.results import add, finish, new_results, print_results, save
from lab.peers.served import run_online
from lab.peers.side import Keep
from orca_jax.flags import add_number, human_int
from orca_jax.tools.bench.online.settings import read_limits
from orca_jax.tools.bench.workload.generate import add_workload_args
from orca_jax.values.errors import ConfigError, OrcaError

NOT_REPORTED = ("run", "command", "environment", "write", "save")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_workload_args(parser)
    parser.set_defaults(num_requests=32)
    names = (*PEERS, *UNAVAILABLE)
    parser.add_argument(
        "--peer", nargs="+", choices=("all", *names), default=["all"], help="engines (default: all)"
    )
    parser.add_argument(
        "--environment", nargs="+", default=[], metavar="[NAME=]DIR",
        help="folders of the environments, made if they do not exist; NAME= may be left out for a single peer "
        "(default: ~/.cache/orca-jax/peers/NAME)",
    )  # fmt: skip
    parser.add_argument(
        "--modes", nargs="+", metavar="NAME",
        help="ways of running a single peer in passes; its server has one (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--model",
        default="preset:gpt2",
        metavar="MODEL",
        help="directory or preset (default: preset:gpt2)",
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"],
        help="types (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of processors (default: all processors)",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=human_int,
        default=64,
        metavar="N",
        help="requests in our batch (default: 64)",
    )
    parser.add_argument(
        "--peer-max-num-seqs",
        type=human_int,
        metavar="N",
        help="in a peer's (default: by the peer)",
    )
    add_number(parser, "--seed", 0, "of workload and weights")
    add_number(parser, "--timeout", 1800.0, "longest start or pass", metavar="SECONDS")
    _add_kinds(parser)
    _add_outputs(parser)
    parser.add_argument(
        "engine_flags", nargs="*", metavar="-- FLAG", help="further flags of our engine"
    )


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurements")
    group.add_argument(
        "--offline", action="store_true", help="only passes over the workload, without servers"
    )
    group.add_argument("--online", action="store_true", help="only servers")
    add_number(group, "--rounds", 3, "passes of each side")
    add_number(group, "--online-rounds", 1, "visits to each server")
    add_number(
        group,
        "--load",
        [0.5, 0.8],
        "rates of arrival, as parts of our throughput in a burst",
        nargs="*",
        metavar="X",
    )
    group.add_argument(
        "--goodput", nargs="+", default=["ttft:2000", "tpot:200"], metavar="NAME:MS",
        help="limits of good requests, in milliseconds (default: ttft:2000 tpot:200)",
    )  # fmt: skip
    group.add_argument(
        "--clients", nargs="+", choices=tuple(CLIENTS), default=[],
        help="clients of others that also measure each server (default: none)",
    )  # fmt: skip


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument(
        "--save", metavar="FILE", help="add the results to the JSON of a file, after each setting"
    )
    group.add_argument(
        "--write", metavar="DIR", help="only write the inputs of the programs: workload and model"
    )


def run(args: argparse.Namespace) -> None:
    """Run all comparisons; print tables and a line of JSON.

    Raises:
        ConfigError: a flag is wrong.
        OrcaError: our side ended, or no peer is available.
    """
    if args.write is not None:
        Path(args.write).mkdir(parents=True, exist_ok=True)
        found = write_inputs(args, Path(args.write))
        print(json.dumps({"workload": str(found.workload), "model": str(found.model)}))
        return
    results = new_results(args.save)
    names = _check(args)
    config = {name: value for name, value in vars(args).items() if name not in NOT_REPORTED}

    def keep(part: Mapping[str, Any]) -> None:
        add(results, part, args.num_requests)
        if args.save is not None:
            save(finish(results, config), args.save)

    _measure(args, names, keep)
    print_results(results)
    print(json.dumps(finish(results, config)))


def _measure(args: argparse.Namespace, names: list[str], keep: Keep) -> None:
    folders = _folders(args, names)
    environments = []
    for name in names:
        if name in UNAVAILABLE:
            keep({"unavailable": {name: UNAVAILABLE[name]}})
            continue
        try:
            environments.append(_environment(name, PEERS[name], folders))
        except OrcaError as error:
            if len(names) == 1:
                raise
            keep({"unavailable": {name: str(error)}})
            print(f"warning: {name} is not available: {error}", file=sys.stderr)
    clients = [_environment(name, CLIENTS[name], folders) for name in args.clients]
    if not environments:
        raise OrcaError(
            f"not available: {', '.join(f'{name} ({UNAVAILABLE.get(name, "see above")})' for name in names)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        inputs = write_inputs(args, Path(folder))
        if not args.online:
            run_offline(args, inputs, environments, keep)
        if not args.offline:
            run_online(args, inputs, environments, clients, keep)


def _environment(name: str, peer: Peer, folders: Mapping[str, Path]) -> Environment:
    program_of(peer.program)
    folder = folders.get(name) or default_folder(name)
    return Environment(name, peer, folder, prepare_environment(peer, folder))


def _folders(args: argparse.Namespace, names: list[str]) -> dict[str, Path]:
    """Read --environment. Raises ConfigError."""
    folders: dict[str, Path] = {}
    for text in args.environment:
        name, separator, folder = text.partition("=")
        if not separator and len(names) == 1:
            name = names[0]
            folder = text
        if name not in (*PEERS, *CLIENTS) or not folder:
            known = ", ".join((*PEERS, *CLIENTS))
            message = f"environment {text!r} is not NAME=DIR with one of these names: {known}"
            raise ConfigError(message, param="environment")
        folders[name] = Path(folder)
    return folders


def _check(args: argparse.Namespace) -> list[str]:
    """Refuse wrong flags, and set the default of the threads. Returns the names of the peers."""
    names = list(dict.fromkeys([*PEERS, *UNAVAILABLE] if "all" in args.peer else args.peer))
    for name in ("rounds", "online_rounds"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(args, name)}", param=name)
    if args.offline and args.online:
        raise ConfigError(
            "offline and online exclude each other; leave out both for all measurements",
            param="online",
        )
    if any(not part > 0 for part in args.load):
        raise ConfigError(f"load must be above 0, got {args.load}", param="load")
    read_limits(args.goodput)
    known = list(chain.from_iterable(PEERS[name].modes for name in names if name in PEERS))
    for mode in args.modes or ():
        if mode not in known:
            raise ConfigError(
                f"modes of {', '.join(names)} are {', '.join(known)}, got {mode!r}", param="modes"
            )
    available = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    args.threads = args.threads or [available]
    if not all(1 <= number <= available for number in args.threads):
        message = (
            f"threads must be from 1 to {available}, the available processors, got {args.threads}"
        )
        raise ConfigError(message, param="threads")
    return names
