"""Flags for numbers, whose help ends with their default."""

import argparse
from collections.abc import Sequence


def add_number(
    parser: argparse._ActionsContainer,
    name: str,
    default: float | Sequence[float],
    meaning: str,
    *,
    metavar: str = "N",
    nargs: str | int | None = None,
) -> None:
    """Add a flag for numbers of the type of its default.

    Args:
        parser: the parser of the command, or a group of its flags.
        name: the flag, with its dashes.
        default: one number, or at least one if the flag takes several.
        meaning: the help, without the default.
        metavar: what stands for a number in the help.
        nargs: how many numbers the flag takes, as in `argparse`; None: one.
    """
    numbers = default if isinstance(default, Sequence) else (default,)
    shown = " ".join(str(number).removesuffix(".0") for number in numbers)
    parser.add_argument(
        name,
        type=type(numbers[0]),
        default=default,
        nargs=nargs,
        metavar=metavar,
        help=f"{meaning} (default: {shown})",
    )
