"""The tables of support as Markdown, for docs/flags.md."""

import re
from collections.abc import Iterable, Sequence

from lab.pages.markdown import table
from orca_jax.assembly.support import MOMENTS, NEEDS
from orca_jax.flags import flag_of
from orca_jax.flags.needs import FLAG_NEEDS

MOST = 8  # names in a row


def block() -> str:
    """Return a table for each moment of checks: the setting, and the message of its refusal."""
    parts = []
    for moment, when in MOMENTS.items():
        rows = [(need.setting, need.reason) for need in NEEDS if need.moment == moment]
        parts.append(_table(f"Checked {when}:", rows))
    return "\n".join(parts)


def commands() -> str:
    """Return a table for each command: the flag, and the message of its refusal."""
    parts = []
    for command, needs in FLAG_NEEDS.items():
        rows = [(flag_of(need.flag), need.reason.replace(need.flag, "FLAG")) for need in needs]
        parts.append(_table(f"`{command}`:", rows))
    return "\n".join(parts)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table with one row for each message."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in rows:
        by_reason.setdefault(reason, []).append(name)
    cells = [(_listed(names), _shown(reason, names[0])) for reason, names in by_reason.items()]
    return f"{title}\n\n{table(('setting', 'is refused with'), cells)}"


def _listed(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    shown = ", ".join([f"`{name}`" for name in names[:MOST]])
    return f"{shown} and {len(names) - MOST} more" if len(names) > MOST else shown


def _shown(reason: str, flag: str) -> str:
    """A message with the names of its values in place of the values."""
    named = reason.replace("FLAG", flag.removeprefix("--").replace("-", "_"))
    return (
        re.sub(r"\{f\.(?:\w+\.)*(\w+)[^}]*\}", r"*\1*", named)
        .replace("*meant*", "")
        .replace("_", r"\_")
    )
