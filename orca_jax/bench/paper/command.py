"""Name the place of the simulated evaluation: `python -m lab reproduce`, in a clone of the repository."""

import argparse

from orca_jax.errors import ConfigError


def add_args(parser: argparse.ArgumentParser) -> None:
    """Accept every flag of before."""
    parser.add_argument("figure", help="fig8, fig9, fig10, fig11, table1 or all")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of before")


def run(args: argparse.Namespace) -> None:
    """Refuse to run. Raises ConfigError."""
    message = f"bench paper is now `python -m lab reproduce {args.figure}`, in a clone of the repository (ARTIFACT.md)"
    raise ConfigError(message, param="figure")
