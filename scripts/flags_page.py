"""Writes the list of all flags of the server into docs/flags.md, from its parser: `python scripts/flags_page.py`."""

import argparse
from pathlib import Path

from orca_jax.serve.args import make_parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
BEGIN = "<!-- begin: python scripts/flags_page.py -->"
END = "<!-- end: python scripts/flags_page.py -->"


def actions() -> list[tuple[str, list[argparse.Action]]]:
    """Return the flags of the server by groups, each with its title."""
    found = [(group.title or "", list(group._group_actions)) for group in make_parser()._action_groups]
    return [(title, flags) for title, flags in found if any(flag.option_strings for flag in flags)]


def flag_list() -> str:
    """Return a table of the flags of each group: names and meaning."""
    parts = []
    for title, flags in actions():
        parts.append(f"\n### {title[:1].upper()}{title[1:]}\n\n| flag | meaning |\n|---|---|\n")
        parts += [_row(flag) for flag in flags if flag.option_strings]
    return "".join(parts)


def renewed(text: str) -> str:
    """Return the text of the page with the list written again."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{flag_list()}\n{END}{rest.partition(END)[2]}"


def _row(flag: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in flag.option_strings)
    values = f": {', '.join(f'`{value}`' for value in flag.choices)}" if flag.choices else ""
    meaning = f"{(flag.help or '') % vars(flag)}{values}".replace("|", "\\|")
    return f"| {names} | {meaning} |\n"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
