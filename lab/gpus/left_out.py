"""`python -m lab gpu_tables`: errors between the points of measured kernels, by leaving out each inner grid line.

A line of a table, such as all products with n = 512, is left out, and looked up between its two neighbours by the rule
of `tools/plan/kernels.py`. The errors are shares of the measured times.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

from lab.gpus.command import PAGE
from lab.pages.markdown import table, write_between
from orca_jax.helpers.reporting import percentile
from orca_jax.tools.plan.kernels import (
    COLUMNS,
    RULES,
    TEXTS,
    HeadsPlane,
    Plane,
    nearest_heads,
    read_attention,
)
from orca_jax.tools.plan.measured import Curve, power_between, read_rows
from orca_jax.values.errors import ConfigError

BEGIN = "<!-- begin: python -m lab gpu_tables --data DIR --write -->\n"
END = "<!-- end of tables -->"
FIXED = ("gpus", "heads", "kv_heads")
"""Columns without a rule between their single numbers; a pair of heads is looked up from other pairs."""
BY_POWER = ("context_attention", "tokens")
"""The table and the column that follow powers."""
LIMITS = {
    "gemm": (0.06, 0.20),
    "context_attention": (0.06, 0.20),
    "generation_attention": (0.05, 0.40),
    "collectives": (0.05, 0.20),
}
"""The most that the median and the 90th percentile may be, by kind of table."""

type Points = Mapping[tuple[str | int, ...], float]
"""Seconds by the cells of a line."""


class LeftOut(NamedTuple):
    """The errors of a column of a table."""

    table: str
    kind: str
    column: str
    errors: Sequence[float]

    @property
    def is_within(self) -> bool:
        """Return True if the median and the 90th percentile are within their limits."""
        most, most_of_tail = LIMITS[self.kind]
        return median(self.errors) <= most and percentile(self.errors, 90) <= most_of_tail


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder of the tables of kernels"
    )
    parser.add_argument("--write", action="store_true", help=f"write the errors into {PAGE}")


def run(args: argparse.Namespace) -> int:
    """Print the errors of all tables. Return 1 if one of them is above its limit.

    Raises:
        ConfigError: there is no table, or one is wrong; `param` names the flag.
    """
    paths = sorted(chain.from_iterable(args.data.glob(f"*_{kind}*.csv*") for kind in COLUMNS))
    paths = [path for path in paths if path.name.split("_")[1] == "sxm"]
    if not paths:
        raise ConfigError(f"{args.data} has no tables of kernels", param="data")
    found = list(chain.from_iterable(left_out(path) for path in paths))
    text = _table(found)
    print(text, end="")
    if args.write:
        write_between(PAGE, BEGIN, END, text)
    return int(not all(each.is_within for each in found))


def left_out(path: Path) -> Iterator[LeftOut]:
    """Yield the errors of each column. Raises ConfigError: a line of the table is wrong."""
    kind = next(each for each in COLUMNS if f"_{each}" in path.name)
    texts = TEXTS.get(kind, ())
    points: dict[tuple[str | int, ...], float] = {}
    for row in read_rows(path, COLUMNS[kind], texts):
        points[row.name, *row.key] = row.seconds
    for place, column in enumerate(COLUMNS[kind], start=1):
        if column not in FIXED:
            is_power = (kind, column) == BY_POWER
            errors = list(column_errors(points, place, is_power=is_power))
            yield LeftOut(path.name.partition(".")[0], kind, column, errors)
    if "heads" in COLUMNS[kind]:
        yield LeftOut(path.name.partition(".")[0], kind, "heads", list(heads_errors(path, kind)))


def heads_errors(path: Path, kind: str) -> Iterator[float]:
    """Yield the errors of all points of each pair of heads and key/value heads that other pairs stand for."""
    known = read_attention(path)
    is_of_prompts = kind == BY_POWER[0]
    for pair, lines in known.items():
        others = [each for each in known if each != pair]
        shares, factor = nearest_heads(others, *pair)
        planes = {Plane(known[key], is_of_prompts=is_of_prompts): shares[key] for key in shares}
        found = HeadsPlane(planes, factor)
        for tokens, line in lines.items() if planes else ():
            for batch, seconds in line.items():
                yield abs(found.at(batch, tokens) / seconds - 1)


def column_errors(points: Points, place: int, *, is_power: bool) -> Iterator[float]:
    """Yield the error of each point between its neighbours in a column, as a share of its seconds."""
    lines: dict[tuple[str | int, ...], dict[int, float]] = {}
    for key, seconds in points.items():
        number = int(key[place])
        lines.setdefault(key[:place] + key[place + 1 :], {})[number] = seconds
    for line in lines.values():
        numbers = sorted(line)
        for low, number, high in zip(numbers, numbers[1:], numbers[2:], strict=False):
            if is_power:
                found = power_between(number, (low, line[low]), (high, line[high]))
            else:
                found = Curve({low: line[low], high: line[high]}).at(number)
            yield abs(found / line[number] - 1)


def _table(found: Sequence[LeftOut]) -> str:
    rows = []
    for each in found:
        verdict = "" if each.is_within else " FAIL"
        numbers = [f"{median(each.errors):.1%}", f"{percentile(each.errors, 90):.1%}{verdict}"]
        limits = ", ".join([f"{limit:.0%}" for limit in LIMITS[each.kind]])
        cells = [each.table, each.column, f"{len(each.errors):,}", *numbers, limits]
        rows.append([*cells, RULES[each.kind]])
    return table(["table", "column", "points", "median", "p90", "limits", "rule"], rows) + "\n"
