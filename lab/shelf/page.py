"""The page `docs/shelf.md`: the policies of the shelf, a picture, and the tables, from the recorded result."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lab.pages.markdown import wide_table
from lab.shelf.table import COLUMNS, PATIENCE, POLICIES, READING, RESULT, mean_and_half, row_of
from lab.shelf.table import LOADS as LEVELS
from orca_jax.helpers.reporting import new_figure, save_plot, use_plain_numbers

LOADS: Mapping[str, str] = {
    "orca": "Lengths of the Orca paper",
    "agents": "Agents: programs of several calls",
    "azure": "Azure's conversations",
    "mooncake": "Mooncake's conversations",
}
NOTES: Mapping[str, str] = {
    "lpm": "the longest match first, without a bound",
    "k_lpm": "k is 16",
    "sorted_f": "in the order of Sorted-F (Wang et al., arXiv 2508.06133)",
    "srpt": "with the true lengths",
    "srpt_quantiles": "with the quantiles of the lengths so far",
    "srpt_noisy": "with noise of half a unit of the logarithm",
}
"""What sets apart policies of one file."""
COLORS: Mapping[str, float] = {"#9cd3f5": -0.22, "#2c8cc4": 0.0, "#004d7a": 0.22}
"""The levels, from light to dark, each with its place in a row."""
LATENCIES = 7
"""Columns of the first table of a level; the others are in a second one."""
SOURCE = ".."  # from the page
PICTURE = RESULT.parents[2] / "docs" / "shelf.svg"
PICTURED = "p99_normalized_ms"


def policies() -> str:
    """The policies with the first sentences of their files."""
    rows = []
    for name, make in POLICIES.items():
        module = type(make()).__module__
        text = (
            (import_module(module).__doc__ or "")
            .partition("\n\n")[0]
            .replace("\n", " ")
            .rstrip(".")
        )
        link = f"[`{name}`]({SOURCE}/{module.replace('.', '/')}.py)"
        rows.append([link, f"{text}{'; ' if name in NOTES else ''}{NOTES.get(name, '')}."])
    return wide_table(["name", "policy"], rows)


def about() -> str:
    """What was run, and what the columns are."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    return (
        f"Each policy serves the same {found['requests']:,} requests at {', '.join(map(str, LEVELS))} of the "
        f"saturation of `sarathi`, with {found['seeds']} seeds, on one simulated {found['device']} with the "
        f"{found['model']} model of the Orca paper, in virtual time. All runs took {found['minutes']:.0f} minutes of "
        f"one core, and 78 minutes of a busy one with `--num-requests 2000`: where short requests come first, the 99th "
        f"percentiles grow with the length of a run. A value is the mean of the seeds, and ± half of their range.\n\n"
        "- Of the clients A and B, B sends a fourth of the requests; agents are clients of their own. *Jain* is the "
        "index of the mean normalised latencies of the clients: 1 if all are equal.\n"
        "- *Service gap*: the largest difference of the tokens served to A and B while both wait (VTC).\n"
        f"- *QoE*: the share of the tokens that come before a reader expects them, the first one after "
        f"{PATIENCE:g} s, and then {READING:g} in each second.\n"
        "- *Computed twice*: tokens that were computed again after a preemption, by all tokens.\n\n"
        "No row claims what its paper measured on other devices.\n"
    )


def tables() -> str:
    """For each load the table of each level."""
    parts = list[str]()
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    for name, levels in found["loads"].items():
        parts.append(f"## {LOADS[name]}\n")
        keys = [key for key in COLUMNS if key != "service_gap" or name != "agents"]
        for level, each in levels.items():
            parts.append(f"{level} of the saturation:\n")
            for part in (keys[:LATENCIES], keys[LATENCIES:]):
                rows = [row_of(policy, figures, part) for policy, figures in each.items()]
                parts.append(wide_table(["", *[COLUMNS[key] for key in part]], rows))
    return "\n".join(parts)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each load: a row for each policy, and a point with its spread for each level."""
    loads = found["loads"]
    figure = new_figure(2.6 * len(loads) + 1.2, 4.2)
    panels = figure.subplots(1, len(loads), squeeze=False, sharey=True)[0]
    for axes, (name, levels) in zip(panels, loads.items(), strict=True):
        for (level, each), (color, shift) in zip(levels.items(), COLORS.items(), strict=False):
            values = [mean_and_half(figures[PICTURED]) for figures in each.values()]
            places = [row + shift for row in range(len(values))]
            axes.errorbar(
                [mean for mean, _ in values], places, xerr=[half for _, half in values], fmt="o", color=color,
                markersize=4, linewidth=1.2, label=f"{level} of the saturation",
            )  # fmt: skip
        axes.set(title=LOADS[name].partition(":")[0], xscale="log", xlabel="ms/token")
        use_plain_numbers(axes.xaxis)
        axes.grid(visible=True, axis="x", which="both", alpha=0.25)
    panels[0].set_yticks(range(len(POLICIES)), list(POLICIES))
    panels[0].invert_yaxis()
    figure.suptitle("99th percentile of the normalised latency, with the range of three seeds")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save_plot(figure, str(path))
