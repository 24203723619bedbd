"""The flags of the benchmark of quantised weights and KV caches, without JAX."""

import argparse
from pathlib import Path

from orca_jax.flags import add_number


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--model", default="demo", metavar="MODEL", help="model to measure (default: demo)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of plain weights (default: float32)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="a text, whose first 4,096 tokens are read in parts of 512; default: five short ones, bundled",
    )
    parser.add_argument(
        "--published",
        nargs="+",
        default=(),
        metavar="DIR",
        help="directories with the same model in published forms, such as AWQ; each is a row",
    )
    add_number(parser, "--rows", 8, "requests at once")
    add_number(parser, "--output-len", 32, "tokens of each request")
    add_number(parser, "--passes", 3, "timed passes of each engine; 0: none")
