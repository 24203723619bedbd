"""The names of systems in the paper's evaluation: a scheduler with its sizes."""

import re
from dataclasses import dataclass

from orca_jax.errors import ConfigError

_NAME = re.compile(r"(orca|chunked|cells)\((\d+)\)|ft\((\d+)[,;] ?(\d+)\)")


@dataclass(frozen=True)
class System:
    """An engine with its scheduler, by the paper's name: `orca(max_bs)`, `ft(max_bs,mbs)`, `chunked` or `cells`."""

    kind: str
    max_bs: int
    mbs: int = 0

    @property
    def name(self) -> str:
        """The paper's name."""
        return f"{self.kind}({self.max_bs},{self.mbs})" if self.kind == "ft" else f"{self.kind}({self.max_bs})"


def parse_system(text: str) -> System:
    """The system of a name. Raises ConfigError for another text."""
    match = _NAME.fullmatch(text)
    if match is None:
        message = f"{text!r} is not a system such as orca(32), ft(8,8), chunked(32) or cells(32)"
        raise ConfigError(message, param="systems")
    kind, max_bs, ft_bs, mbs = match.groups()
    sizes = [int(size) for size in (max_bs or ft_bs, mbs) if size]
    if min(sizes) < 1:
        raise ConfigError(f"{text!r} has a size below 1", param="systems")
    return System(kind or "ft", *sizes)
