"""The names of systems in the paper's evaluation: a scheduler with its sizes."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from orca_jax.values.errors import ConfigError

KINDS = ("orca", "ft", "chunked", "cells")
MICROBATCHED = ("ft", "request_level")
_NAME = re.compile(r"(\w+)\((\d+)(?:[,;] ?(\d+))?\)")


@dataclass(frozen=True)
class System:
    """An engine with its scheduler, by the paper's name: `orca(max_bs)`, `ft(max_bs,mbs)`, or another kind."""

    kind: str
    max_bs: int
    mbs: int = 0

    @property
    def name(self) -> str:
        """The paper's name."""
        return (
            f"{self.kind}({self.max_bs},{self.mbs})" if self.mbs else f"{self.kind}({self.max_bs})"
        )


def parse_system(text: str, kinds: Collection[str] = KINDS) -> System:
    """The system of a name. Raises ConfigError for another text."""
    match = _NAME.fullmatch(text)
    if (
        match is None
        or match[1] not in kinds
        or (match[1] in MICROBATCHED) != (match[3] is not None)
    ):
        message = f"{text!r} is not a system such as orca(32), ft(8,8), chunked(32) or cells(32)"
        raise ConfigError(message, param="systems")
    sizes = [int(size) for size in (match[2], match[3]) if size]
    if min(sizes) < 1:
        raise ConfigError(f"{text!r} has a size below 1", param="systems")
    return System(match[1], *sizes)
