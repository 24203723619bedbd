"""The tables of retentions on `docs/shelf.md`, from the recorded result."""

import json
import statistics
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from lab.pages.markdown import table, wide_table
from lab.retention.runs import BASE, BOUND, PAPERS
from lab.retention.table import RESULT, beats, claims, of_the_way, ratios
from lab.shelf.table import shown
from orca_jax.values.config import RETENTIONS

TITLES: Mapping[str, str] = {
    "agents": "agents with tools",
    "mooncake": "Mooncake's conversations",
    "azure": "Azure's lengths after templates",
}
HEAD = ["", "hit rate", "of the way to Belady", "mean TTFT, LRU by it", "p99 TTFT, LRU by it"]
HEAD += ["pages given up, LRU by it"]


def block() -> str:
    """What was run, a table for each load and size of the cache, and the claims."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    parts = [_policies(), _about(found)]
    for load, sizes in found["loads"].items():
        for pages, case in sizes.items():
            parts.append(f"### {TITLES[load].capitalize()}, {int(pages):,} pages\n")
            parts.append(wide_table(HEAD, [_row(case, name) for name in case]))
    rows = [
        [row.text, str(row.ours), str(row.paper), f"**{row.verdict}**"] for row in claims(found)
    ]
    parts.append("### The papers' numbers\n")
    parts.append(table(["value", "ours", "the paper", "verdict"], rows))
    return "\n".join(parts)


def _policies() -> str:
    rows = [[f"`{name}`", f"{row.words.partition(': ')[2]}."] for name, row in RETENTIONS.items()]
    for name, kind in PAPERS.items():
        text = (import_module(kind.__module__).__doc__ or "").partition("\n\n")[0]
        path = kind.__module__.replace(".", "/")
        rows.append([f"[`{name}`](../{path}.py)", text.replace("\n", " ")])
    rows.append(
        [
            f"[`{BOUND}`](../lab/retention/belady.py)",
            "Clairvoyance: the farthest next use goes first (Belady, 1966).",
        ]
    )
    return wide_table(["name", "retention"], rows)


def _about(found: Mapping[str, Any]) -> str:
    most = len(RETENTIONS) - 1 + len(PAPERS)
    counts = [f"{len(names)} at {where} pages" for where, names in beats(found).items()]
    cases: list[Mapping[str, Any]] = []
    for sizes in found["loads"].values():
        cases += sizes.values()
    bound = max([statistics.fmean(ratios(case, BOUND, "mean_ttft_ms")) for case in cases])
    return (
        f"`python -m lab retention --traces DIR --record` serves {found['requests']:,} requests (Azure: 0.4 of them) "
        f"at {found['load']} of the saturation, with {found['seeds']} seeds, on the simulated {found['device']} of "
        "the tables above with 16 requests in an iteration, in virtual time, under `chunked` in the order of arrival. "
        "A value is the mean of the seeds, and ± half of their range; ratios above 1 are better than LRU. Agents send "
        "their session, a wish for 300 s, and the end of the session; the traces have no wishes, so `lru-ttl` is LRU "
        "there. The trace of Azure has no texts: its prompts come after one of 24 templates. Belady knows the order of "
        "requests under LRU.\n\n"
        f"Of the {most} others, so many have more hits than LRU with every seed: {', '.join(counts)}. With "
        f"clairvoyance the mean TTFT is at most {bound:.2f} times lower than with LRU, so no larger claim can hold on "
        "these loads.\n"
    )


def _row(case: Mapping[str, Any], name: str) -> list[str]:
    """The row of a retention."""
    cells = [shown(case[name]["hit_rate"])]
    cells.append("" if name == BASE else shown_share(of_the_way(case, name)))
    for key in ("mean_ttft_ms", "p99_ttft_ms", "lost"):
        cells.append("" if name == BASE else shown(ratios(case, name, key)))
    return [f"`{name}`", *[cell.replace(" ", "\u00a0") for cell in cells]]


def shown_share(values: list[float]) -> str:
    """A mean share in percent, with half of the range."""
    mean = sum(values) / len(values)
    half = (max(values) - min(values)) / 2
    return f"{100 * mean:.0f} ± {100 * half:.0f} %"
