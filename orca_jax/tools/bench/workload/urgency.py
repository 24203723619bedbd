"""Values for schedulers of the requests of a load: flags with values that the requests draw from."""

import argparse
import random
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.request import DEFAULT_URGENCY, Urgency

_FLAGS: Mapping[str, tuple[type, str, str]] = {
    "priority": (int, "N", "priorities; lower ones are more urgent"),
    "tenant": (str, "NAME", "callers"),
    "deadline": (float, "SECONDS", "wanted seconds from the arrival to the end"),
    "program": (str, "NAME", "agents or conversations"),
}


def add_urgency_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags, and a note about the columns of a file."""
    group = parser.add_argument_group(
        "for schedulers",
        "Each request draws one of the values. Columns or keys of --trace-data, also weight, ttft and tpot, count "
        "more.",
    )
    for name, (kind, metavar, text) in _FLAGS.items():
        group.add_argument(
            f"--{name}", type=kind, nargs="+", metavar=metavar, help=f"{text} (default: none)"
        )


def drawn(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the flags that were given."""
    return {name: values for name in _FLAGS if (values := getattr(args, name)) is not None}


class UrgencyDraws:
    """Draws the values of each request, in the order of the load.

    Args:
        args: the flags.
        seed: seed of the draws.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self._values = drawn(args)
        self._draws = {name: random.Random(f"{name}-{seed}") for name in self._values}
        for name, values in self._values.items():
            for value in values:
                try:
                    Urgency(**{name: value})
                except RequestError as error:
                    raise ConfigError(error.message, param=name) from error

    def urgency(self, given: Urgency) -> Urgency:
        """The values of the next request: those that a file has given, or drawn ones."""
        found = {name: draw.choice(self._values[name]) for name, draw in self._draws.items()}
        changed = {
            each.name
            for each in fields(Urgency)
            if getattr(given, each.name) != getattr(DEFAULT_URGENCY, each.name)
        }
        return replace(
            given, **{name: value for name, value in found.items() if name not in changed}
        )
