"""Write the numbers in the pages again, from the recorded results.

A number or a block between two comments comes from a recorded result:

    <!-- from lab: FILE KEY... FORMAT -->37.6<!-- end -->
    <!-- from lab: block NAME -->
    | ... |
    <!-- end -->

FILE is a JSON file below the project's root, without `.json`. Each KEY is a name or an index in it. FORMAT is a Python
format such as `.1f`. NAME is a function of `BLOCKS`, which returns lines of Markdown.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lab import control_plane, workers
from lab.reproduce import baselines, blocks
from orca_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "ARTIFACT.md", "docs/paper.md")
BLOCKS: Mapping[str, Callable[[], str]] = {
    "baselines": baselines.block,
    "beyond": blocks.beyond,
    "claims": blocks.claims,
    "control": control_plane.block,
    "errors": blocks.errors,
    "what_if": blocks.what_if,
    "workers": workers.block,
}
"""Blocks of Markdown by name."""
_MARKED = re.compile(r"<!-- from lab: (?P<what>[^>]+?) -->(?P<text>.*?)<!-- end -->", re.DOTALL)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("--check", action="store_true", help="write nothing; the exit status is 1 if a page is old")


def run(args: argparse.Namespace) -> int:
    """Write or check all pages.

    Raises:
        ConfigError: a marker names something that does not exist.
    """
    old = []
    for path in [ROOT / name for name in PAGES if (ROOT / name).exists()]:
        text = path.read_text(encoding="utf-8")
        fresh = renewed(text)
        if fresh != text:
            old.append(path.name)
            if not args.check:
                path.write_text(fresh, encoding="utf-8")
    print(f"{'old' if args.check else 'written'}: {', '.join(old) or 'none'}")
    return int(args.check and bool(old))


def renewed(text: str, root: Path = ROOT) -> str:
    """The text of a page with the values of its markers read again.

    Raises:
        ConfigError: a marker names something that does not exist.
    """
    return _MARKED.sub(
        lambda found: f"<!-- from lab: {found['what']} -->{_value(found['what'], root)}<!-- end -->", text
    )


def _value(what: str, root: Path) -> str:
    first, *rest = what.split()
    try:
        if first == "block":
            return f"\n{BLOCKS[rest[0]]().strip()}\n"
        *keys, form = rest
        value: Any = json.loads((root / f"{first}.json").read_text(encoding="utf-8"))
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
        return format(value, form)
    except (OSError, KeyError, IndexError, ValueError, TypeError) as error:
        message = f"the marker 'from lab: {what}' cannot be written: {type(error).__name__}: {error}"
        raise ConfigError(message, param="pages") from error
