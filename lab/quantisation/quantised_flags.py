"""The flags of the benchmark of quantised weights and KV caches, without JAX."""

import argparse
from pathlib import Path


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", default="demo", metavar="MODEL", help="model to measure (default: demo)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="type of plain weights (default: float32)"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="a text, whose first 4,096 tokens are read in parts of 512; default: five short ones, bundled",
    )
    parser.add_argument("--rows", type=int, default=8, metavar="N", help="requests at once (default: 8)")
    parser.add_argument("--output-len", type=int, default=32, metavar="N", help="tokens of each request (default: 32)")
    parser.add_argument(
        "--passes", type=int, default=3, metavar="N", help="timed passes of each engine; 0: none (default: 3)"
    )
