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
from lab.decisions import page as decisions_page
from lab.pages import deployments, protocols, support
from lab.pages.markdown import Page, wide_table
from lab.peers import files_page
from lab.peers import page as peers_page
from lab.real.page import held_out, measured
from lab.reproduce import baselines, blocks
from lab.retention import page as retention_page
from lab.shelf import burst
from lab.shelf import page as shelf
from orca_jax.serve.openapi import openapi_document
from orca_jax.values.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
_DOCS = (
    "benchmarks",
    "comparison",
    "flags",
    "operations",
    "own_scheduler",
    "paper",
    "peers",
    "serving",
    "shelf",
    "typed_decisions",
)
PAGES = ("README.md", "ARTIFACT.md", *(f"docs/{name}.md" for name in _DOCS))


def schedulers() -> str:
    """The table of the sweep over arrival rates in `docs/measured/schedulers.json`, with its command."""
    found = json.loads((ROOT / "docs" / "measured" / "schedulers.json").read_text(encoding="utf-8"))
    rows = []
    for load in found["loads"]:
        place = (
            "all at once" if load["rate"] is None else f"{load['rate']:.2f} ({load['load']} times)"
        )
        for name, each in load["results"].items():
            keys = (
                "median_normalized_latency_ms",
                "p99_normalized_latency_ms",
                "median_itl_ms",
                "p99_itl_ms",
            )
            latency, largest, *gaps = [_rounded(each[key]) for key in keys]
            ttft = f"{each['p99_ttft_ms'] / 1000:.1f}"
            rows.append(
                [
                    place,
                    f"`{name}`",
                    f"{each['output_tokens_per_s']:.1f}",
                    latency,
                    largest,
                    ttft,
                    *gaps,
                ]
            )
            place = ""
    head = [
        "arrivals, requests/s",
        "",
        "output tokens/s",
        "median normalised latency, ms/token",
        "largest",
    ]
    head += ["largest TTFT, s", "median gap between tokens, ms", "p99 gap, ms"]
    command = found["command"].replace("python -m orca_jax.bench", "orca-jax bench")
    return f"{wide_table(head, rows)}\n`{command}`, {found['began']}, commit {found['commit']}."


def routes() -> str:
    """The routes of the server, as its own document has them."""
    paths = openapi_document(["model"], {}, has_keys=True)["paths"]
    rows = []
    for path, one in paths.items():
        for method, each in one.items():
            if "summary" in each:
                rows.append([f"`{method.upper()} {path}`", each["summary"]])
    return wide_table(["route", "answer"], rows)


def _rounded(value: float) -> str:
    return "" if not value else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


BLOCKS: Mapping[str, Callable[[], str]] = {
    "baselines": baselines.block,
    "beyond": blocks.beyond,
    "claims": blocks.claims,
    "commands": support.commands,
    "control": control_plane.block,
    "decisions": decisions_page.block,
    "deployments": deployments.block,
    "errors": blocks.errors,
    "held_out": held_out,
    "later": blocks.later,
    "measured": measured,
    "peers": peers_page.block,
    "peers_files": files_page.block,
    "policy_job": protocols.job,
    "policy_span": protocols.span,
    "policy_view": protocols.view,
    "retention": retention_page.block,
    "routes": routes,
    "schedulers": schedulers,
    "shelf": shelf.tables,
    "shelf_about": shelf.about,
    "shelf_burst": burst.block,
    "shelf_policies": shelf.policies,
    "support": support.block,
    "what_if": blocks.what_if,
    "workers": workers.block,
}
"""Blocks of Markdown by name."""
_MARKED = re.compile(r"<!-- from lab: (?P<what>[^>]+?) -->(?P<text>.*?)<!-- end -->", re.DOTALL)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "--check", action="store_true", help="write nothing; the exit status is 1 if a page is old"
    )


def run(args: argparse.Namespace) -> int:
    """Write or check all pages.

    Raises:
        ConfigError: a marker names something that does not exist.
    """
    old = []
    for page in [page for page in pages() if page.path.exists() and page.is_old()]:
        old.append(page.path.name)
        if not args.check:
            page.write()
    print(f"{'old' if args.check else 'written'}: {', '.join(old) or 'none'}")
    return int(args.check and bool(old))


def pages() -> list[Page]:
    """The pages with markers."""
    return [Page(ROOT / name, renewed, "python -m lab pages") for name in PAGES]


def renewed(text: str, root: Path = ROOT) -> str:
    """The text of a page with the values of its markers read again.

    Raises:
        ConfigError: a marker names something that does not exist.
    """
    return _MARKED.sub(
        lambda found: (
            f"<!-- from lab: {found['what']} -->{_value(found['what'], root)}<!-- end -->"
        ),
        text,
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
        message = (
            f"the marker 'from lab: {what}' cannot be written: {type(error).__name__}: {error}"
        )
        raise ConfigError(message, param="pages") from error
