"""The tables of support as Markdown, for docs/flags.md."""

import re
from collections.abc import Iterable

from orca_jax.assembly.support import MOMENTS, NEEDS
from orca_jax.flags import flag_of
from orca_jax.flags.needs import FLAG_NEEDS

MOST = 8  # names in a row


def block() -> str:
    """Return a table for each moment of checks: the setting, and the message of its refusal."""
    lines = []
    for moment, when in MOMENTS.items():
        lines += _table(
            f"Checked {when}:",
            [(need.setting, need.reason) for need in NEEDS if need.moment == moment],
        )
    return "\n".join(lines).rstrip()


def commands() -> str:
    """Return a table for each command: the flag, and the message of its refusal."""
    lines = []
    for command, needs in FLAG_NEEDS.items():
        rows = [(flag_of(need.flag), need.reason.replace(need.flag, "FLAG")) for need in needs]
        lines += _table(f"`{command}`:", rows)
    return "\n".join(lines).rstrip()


def _table(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    """A table with one row for each message."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in rows:
        by_reason.setdefault(reason, []).append(name)
    lines = [title, "", "| setting | is refused with |", "|---|---|"]
    for reason, names in by_reason.items():
        shown = ", ".join(f"`{name}`" for name in names[:MOST])
        more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
        lines.append(
            f"| {shown}{more} | {_shown(reason.replace('FLAG', names[0].removeprefix('--').replace('-', '_')))} |"
        )
    return [*lines, ""]


def _shown(reason: str) -> str:
    """A message with the names of its values in place of the values."""
    return (
        re.sub(r"\{f\.(?:\w+\.)*(\w+)[^}]*\}", r"*\1*", reason)
        .replace("*meant*", "")
        .replace("_", r"\_")
    )
