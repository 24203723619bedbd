"""Flags of the benchmark of adapters, apart from its imports: help comes at once."""

import argparse


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", default="preset:gpt2", metavar="MODEL", help="model to measure")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="requests at once (default: 32)")
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens of each request (default: 32)")
    parser.add_argument("--rank", type=int, default=8, metavar="R", help="rank of the adapters (default: 8)")
    parser.add_argument(
        "--adapters", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="adapters in one batch"
    )
    parser.add_argument("--passes", type=int, default=5, metavar="N", help="timed passes of each row (default: 5)")
