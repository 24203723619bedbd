"""The flags of the benchmark of products of a few tokens, without JAX."""

import argparse

from orca_jax.flags import add_number


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_number(parser, "--inputs", 4096, "inputs of the matrix")
    add_number(parser, "--outputs", 5504, "its outputs")
    add_number(parser, "--passes", 7, "passes; the minima count")
