"""The colours of all pictures and pages, and the order of schedulers in them: the one table for both.

The palette is that of Okabe and Ito, made for colour-blind readers, with darker and lighter forms for light and dark
pages.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

PAGE_FOLDER = Path(__file__).parent / "page"
"""Scripts and style sheets of pages with charts."""


class SchedulerStyle(NamedTuple):
    """The look of a scheduler in plots, and its name in titles."""

    color: str
    marker: str
    title: str


SCHEDULERS: Mapping[str, SchedulerStyle] = {
    "request_level": SchedulerStyle("#d55e00", "s", "Request-level scheduling, as before Orca"),
    "orca": SchedulerStyle("#0072b2", "o", "Iteration-level scheduling, as in Orca"),
    "chunked": SchedulerStyle("#009e73", "^", "Iteration-level scheduling with prompts in chunks"),
}
"""In the order of all tables, legends and pictures."""
FAMILIES = {"ft": "request_level", "padded": "request_level", "merged": "orca"}
"""Names in the figures of the paper, by the scheduler whose colour they have."""
NEUTRAL = "#666666"
"""The colour of limits, and the last one of `OTHERS`."""
OTHERS = ("#cc79a7", "#e69f00", "#56b4e9", NEUTRAL)
"""Colours of contestants that are not schedulers."""
KINDS = {
    "chunk": "#e69f00",
    "increment": "#0072b2",
    "repeat": "#999999",
    "waiting": "#cccccc",
    "preempted": "#d55e00",
    "idle": "#b5d6ea",
}
"""Colours of the work of a request, in pictures with one colour for each kind."""
REQUESTS = ("#0072b2", "#b86a00", "#00795a", "#b0487f", "#2c8cc4", "#c04a00")
"""Colours of requests, in turns. The kind of work is then a shape."""
DASHES = ("-", "--", ":", "-.")

LIGHT = {
    "page": "#fbfbfa", "card": "#ffffff", "line": "#d9d9d6", "text": "#1c1d1f", "muted": "#5b5e63",
    "accent": "#005f96", "on-accent": "#ffffff", "bad": "#b3261e", "hover": "#eef2f5", "idle": "#8b8f95",
    **{f"r{number}": color for number, color in enumerate(REQUESTS)},
    **{name: style.color for name, style in SCHEDULERS.items()},
}  # fmt: skip
DARK = {
    "page": "#16181b", "card": "#1d2024", "line": "#383c42", "text": "#e8e9eb", "muted": "#a6abb2",
    "accent": "#6fc0ee", "on-accent": "#10151a", "bad": "#ff8a80", "hover": "#292d33", "idle": "#7d838b",
    "r0": "#5cb3ea", "r1": "#e69f00", "r2": "#2fbf92", "r3": "#e38fbb", "r4": "#9cd3f5", "r5": "#f2854a",
    "request_level": "#f2854a", "orca": "#5cb3ea", "chunked": "#2fbf92",
}  # fmt: skip


class CurveStyle(NamedTuple):
    """The look of a curve in plots."""

    color: str
    marker: str
    dashes: str


def scheduler_of(name: str) -> str | None:
    """The scheduler in a name such as `orca`, `orca(32)`, `ft(8,8)` or `chunked --overlap`; None: there is none."""
    word = re.split(r"[ (]", name, maxsplit=1)[0]
    word = FAMILIES.get(word, word)
    return word if word in SCHEDULERS else None


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names by their schedulers; names of one scheduler keep their order, and others come last."""
    order = [*SCHEDULERS, None]
    return sorted(names, key=lambda name: order.index(scheduler_of(name)))


def curve_styles(names: Iterable[str]) -> dict[str, CurveStyle]:
    """Styles of contestants, in order. Those of one scheduler have its colour in shades from light to dark."""
    ordered = in_order(names)
    styles = {}
    for name in ordered:
        family = scheduler_of(name)
        members = [each for each in ordered if scheduler_of(each) == family]
        place = members.index(name)
        dashes = DASHES[(len(members) - 1 - place) % len(DASHES)]
        if family is None:
            styles[name] = CurveStyle(OTHERS[place % len(OTHERS)], "D", dashes)
        else:
            base = SCHEDULERS[family]
            styles[name] = CurveStyle(_shade(base.color, place, len(members)), base.marker, dashes)
    return styles


def palette_css() -> str:
    """The palette as a style sheet. A page follows the system, unless its root has `data-theme`."""
    light = _variables(LIGHT)
    dark = _variables(DARK)
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        ':root[data-theme="light"] { color-scheme: light; }\n'
        f':root[data-theme="dark"] {{ color-scheme: dark; {dark} }}\n'
    )


def _variables(colors: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


def _shade(color: str, place: int, count: int) -> str:
    """A lighter form of a colour at the first of several places, and a darker one at the last."""
    share = 0.0 if count == 1 else 0.5 - 0.65 * place / (count - 1)
    towards = 255 if share > 0 else 0
    parts = [int(color[index : index + 2], 16) for index in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (towards - part) * abs(share)):02x}" for part in parts)
