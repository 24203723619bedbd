"""Flags of the benchmark of adapters, apart from its imports: help comes at once."""

import argparse

from orca_jax.flags import add_number


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", default="preset:gpt2", metavar="MODEL", help="model to measure")
    add_number(parser, "--rows", 32, "requests at once")
    add_number(parser, "--output-len", 32, "tokens of each request")
    add_number(parser, "--rank", 8, "rank of the adapters", metavar="R")
    parser.add_argument(
        "--adapters",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        metavar="N",
        help="adapters in one batch",
    )
    add_number(parser, "--passes", 5, "timed passes of each row")
