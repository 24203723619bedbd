"""The flags of the benchmark of products of a few tokens, without JAX."""

import argparse


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--inputs", type=int, default=4096, metavar="N", help="inputs of the matrix (default: 4096)")
    parser.add_argument("--outputs", type=int, default=5504, metavar="N", help="its outputs (default: 5504)")
    parser.add_argument("--passes", type=int, default=7, metavar="N", help="passes; the minima count (default: 7)")
