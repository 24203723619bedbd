"""Measure a server with streaming clients.

With --base-url alone it is an open loop against any OpenAI-compatible server: requests arrive at their times, drawn at
random or read from a trace. Without it, the benchmark starts its own servers and measures them in a closed loop of
--clients streams; with --base-url, --clients or --tokens select this loop for a running server.
"""

import argparse

from orca_jax.flags import add_model_word, add_number
from orca_jax.flags.needs import check_needs
from orca_jax.tools.bench.online import closed_loop, open_loop
from orca_jax.tools.bench.online.key import KEY_VARIABLE
from orca_jax.tools.bench.online.settings import DEFAULT_REQUESTS, LIMITS
from orca_jax.tools.bench.workload.generate import add_workload_args

CLOSED = ("clients", "tokens")
OWN_SERVER = ("pace", "server_flags")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of both loops."""
    parser.add_argument("--base-url", metavar="URL", help="a running server, with or without /v1")
    model = parser.add_mutually_exclusive_group()
    add_model_word(model)
    model.add_argument(
        "--model", metavar="NAME", help="model name at --base-url (default: its only model)"
    )
    before = set(parser._actions)
    _add_requests(parser)
    _add_arrivals(parser)
    add_workload_args(parser)
    parser.set_defaults(num_requests=None)
    _add_outputs(parser)
    parser.set_defaults(
        open_flags={
            action.dest: action.default for action in parser._actions if action not in before
        }
    )
    group = parser.add_argument_group("closed loop")
    group.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help=f"concurrent streams (default: {closed_loop.CLIENTS})",
    )
    group.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"tokens of every stream (default: {closed_loop.TOKENS})",
    )
    group.add_argument(
        "--pace", type=int, nargs="+", metavar="MS",
        help="milliseconds per iteration of servers of this benchmark; one pass for each (default: 1 100)",
    )  # fmt: skip
    group.add_argument(
        "--server-flags", nargs=argparse.REMAINDER, default=[],
        help="all further flags are passed to the servers of this benchmark",
    )  # fmt: skip


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("open loop: requests")
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions",
        help="route of the requests (default: completions)",
    )  # fmt: skip
    group.add_argument(
        "--prompts", choices=("auto", "ids", "text"), default="auto",
        help="prompts as token ids, or as text of about the same length (default: auto, ids if the server takes them)",
    )  # fmt: skip
    add_number(group, "--vocab-size", 256, "prompts have token ids below N")
    group.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="limit for requests of trace files (default: that of the server, if it reports one)",
    )  # fmt: skip
    group.add_argument(
        "--api-key", metavar="KEY", help=f"bearer token (default: that of {KEY_VARIABLE})"
    )
    group.add_argument(
        "--extra-body", metavar="JSON", help="further fields of every request, as a JSON object"
    )
    add_number(
        group,
        "--timeout",
        600.0,
        "limit for one request, which then counts as failed",
        metavar="SECONDS",
    )


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("open loop: arrivals")
    group.add_argument(
        "--request-rate", type=float, nargs="+", metavar="X",
        help="requests per second, one pass for each; inf: all at once (default: the times of a trace file, else inf)",
    )  # fmt: skip
    add_number(
        group,
        "--burstiness",
        1.0,
        "shape of the gamma distribution of gaps; 1: Poisson, below 1: bursts",
        metavar="X",
    )
    group.add_argument(
        "--duration", type=float, metavar="SECONDS",
        help=f"last arrival of a pass; with --num-requests, the smaller load (default: {DEFAULT_REQUESTS} requests)",
    )  # fmt: skip
    group.add_argument(
        "--warmup-requests", type=int, metavar="N",
        help="first requests of a pass without a part in its figures (default: a tenth)",
    )  # fmt: skip
    add_number(group, "--seed", 0, "seed of prompts and arrivals")


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("open loop: results")
    group.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS",
        help=f"limits in milliseconds for requests to count as good; names: {', '.join(LIMITS)}",
    )  # fmt: skip
    group.add_argument("--save", metavar="FILE", help="also write the line of JSON to a file")
    group.add_argument(
        "--plot", metavar="FILE", help="draw latencies over throughput (needs the extra plot)"
    )
    group.add_argument(
        "--write-trace",
        metavar="FILE",
        help="write the requests as a trace file of Mooncake's format",
    )


def run(args: argparse.Namespace) -> None:
    """Run the loop that the flags select.

    Raises:
        ConfigError: a flag is wrong, or has no effect in this loop; `param` names it.
    """
    given = {name for name in (*CLOSED, *OWN_SERVER) if getattr(args, name) not in (None, [])}
    given |= {name for name, default in args.open_flags.items() if getattr(args, name) != default}
    args.is_open = args.base_url is not None and given.isdisjoint(CLOSED)
    check_needs("bench online", args, given)
    (open_loop if args.is_open else closed_loop).run(args)
