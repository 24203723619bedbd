"""The table of support as Markdown, for docs/support.md."""

import re

from orca_jax.assembly.support import MOMENTS, NEEDS


def block() -> str:
    """Return a table for each moment of checks: the setting, and the message of its refusal."""
    lines = []
    for moment, when in MOMENTS.items():
        lines += [f"Checked {when}:", "", "| setting | is refused with |", "|---|---|"]
        lines += [f"| `{need.setting}` | {_shown(need.reason)} |" for need in NEEDS if need.moment == moment]
        lines.append("")
    return "\n".join(lines).rstrip()


def _shown(reason: str) -> str:
    """A message with the names of its values in place of the values."""
    return re.sub(r"\{f\.(?:config\.|known\.)?(\w+)[^}]*\}", r"*\1*", reason).replace("*meant*", "").replace("_", r"\_")
