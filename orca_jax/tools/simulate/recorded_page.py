"""The page of recorded requests under several policies: one file, without scripts or requests to elsewhere."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.sim.cost import IterationCost, LinearCost

COLUMNS = {
    "median_ttft_ms": "first token, median, ms", "p99_ttft_ms": "99th percentile, ms",
    "p99_inter_token_ms": "between tokens, 99th percentile, ms",
    "median_normalized_latency_ms": "latency per token, median, ms",
    "p99_normalized_latency_ms": "99th percentile, ms", "requests_per_s": "requests/s", "late_requests": "late",
    "preemptions": "preemptions",
}  # fmt: skip
CHARTS = {
    "p99_ttft_ms": "Time to the first token, 99th percentile, ms",
    "median_normalized_latency_ms": "Latency per token, median, ms",
}
LABELS, BARS, LINE = 190, 430, 22
"""Sizes of a chart in pixels."""
STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;
color-scheme:light dark}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums}td,th{
padding:.25rem .6rem;text-align:right;
border-bottom:1px solid #8884}td:first-child,th:first-child{text-align:left}.scroll{overflow-x:auto}
svg{max-width:100%;height:auto}svg text{font:13px system-ui,sans-serif;fill:currentColor}rect{fill:#2c8cc4}"""


class ReplaySettings(NamedTuple):
    """What was recorded, and the settings of all replays."""

    file: str
    form: str
    num_requests: int
    num_left_out: int
    settings: Mapping[str, Any]


class PolicyRow(NamedTuple):
    """The figures of a policy, or the reason why it cannot serve the load."""

    policy: str
    figures: Mapping[str, float]
    fault: str

    @property
    def summary(self) -> str:
        """A line for a terminal."""
        if self.fault:
            return f"not run: {self.fault}"
        return ", ".join(
            [f"{title} {_number(self.figures[name])}" for name, title in COLUMNS.items()]
        )


def _number(value: float) -> str:
    """A figure with four digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def page_of(
    replayed: ReplaySettings,
    cost: IterationCost,
    errors: Mapping[str, float],
    rows: Sequence[PolicyRow],
    *,
    is_fitted: bool,
) -> str:
    """Return the page as HTML."""
    left_out = (
        f" {replayed.num_left_out} without a token are left out." if replayed.num_left_out else ""
    )
    settings = ", ".join([f"{name} {value}" for name, value in replayed.settings.items()])
    served = [row for row in rows if row.figures]
    parts = [
        f"<p>{replayed.num_requests:,} requests of <code>{escape(Path(replayed.file).name)}</code> "
        f"({escape(replayed.form)}) arrive again in virtual time, under each policy.{left_out} "
        f"Settings of all runs: {escape(settings)}.</p>",
        f"<h2>Error of the cost</h2><p>{_error_text(cost, errors, is_fitted=is_fitted)}</p>",
        *[f"<h2>{title}</h2>{_chart(served, name)}" for name, title in CHARTS.items()],
        f"<h2>All figures</h2>{_table(served)}",
        *[
            f"<p><code>{escape(row.policy)}</code> could not serve these requests: {escape(row.fault)}</p>"
            for row in rows
            if row.fault
        ],
    ]
    title = "The recorded requests under other policies"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n<body>'
        f"<h1>{title}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _error_text(cost: IterationCost, errors: Mapping[str, float], *, is_fitted: bool) -> str:
    text = ""
    if isinstance(cost, LinearCost):
        text = (
            f"An iteration takes {1e3 * cost.per_iteration:.4g} ms, {1e6 * cost.per_token:.4g} µs for each "
            f"token, and {1e9 * cost.per_pair:.4g} ns for each pair of tokens in attention. "
        )
    if not errors:
        return text + "The recording has no times, so the error of this cost is not known."
    found = ", ".join([f"{name} {error:.1%}" for name, error in errors.items()])
    of = "requests that the cost was not fitted to" if is_fitted else "all requests"
    return (
        f"{text}Means of a replay under <code>chunked</code> differ from the recorded ones by: {found}. They are "
        f"those of {of}. A difference between policies below this error means nothing."
    )


def _chart(rows: Sequence[PolicyRow], name: str) -> str:
    """Bars, one for each policy."""
    most = max([row.figures[name] for row in rows], default=0.0) or 1.0
    height = LINE * len(rows)
    parts = []
    for place, row in enumerate(rows):
        width = BARS * row.figures[name] / most
        top = place * LINE
        parts.append(
            f'<text x="{LABELS - 8}" y="{top + 15}" text-anchor="end">{escape(row.policy)}</text>'
            f'<rect x="{LABELS}" y="{top + 3}" width="{width:.1f}" height="{LINE - 6}"/>'
            f'<text x="{LABELS + width + 6:.1f}" y="{top + 15}">{_number(row.figures[name])}</text>'
        )
    size = f"{LABELS + BARS + 80} {height}"
    return (
        f'<svg role="img" viewBox="0 0 {size}" width="{LABELS + BARS + 80}">{"".join(parts)}</svg>'
    )


def _table(rows: Sequence[PolicyRow]) -> str:
    head = "".join([f"<th>{title}</th>" for title in ("policy", *COLUMNS.values())])
    lines = []
    for row in rows:
        cells = "".join([f"<td>{_number(row.figures[name])}</td>" for name in COLUMNS])
        lines.append(f"<tr><td>{escape(row.policy)}</td>{cells}</tr>")
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
