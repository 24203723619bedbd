"""Draws timelines and request latencies with matplotlib (the extra `plot`)."""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from orca_jax.helpers.reporting import write_figure
from orca_jax.timeline.measure import Timeline
from orca_jax.timeline.palette import KINDS as COLORS
from orca_jax.timeline.palette import SCHEDULERS, curve_styles
from orca_jax.timeline.spans import Span, SpanKind, request_spans
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.errors import ConfigError, reason_of

Unit = Literal["iterations", "seconds"]

_LABELS: dict[SpanKind, str] = {
    "chunk": "prefill (initiation)",
    "increment": "increment: one token",
    "repeat": "ended, still in the batch",
    "waiting": "waiting",
    "preempted": "preempted",
    "idle": "admitted, not in this iteration",
}
_HEIGHTS: dict[SpanKind, float] = {
    "waiting": 0.16,
    "preempted": 0.3,
    "idle": 0.3,
}  # in rows; the other kinds have `_FULL`
_FULL = 0.8
_HATCHES: dict[SpanKind, str] = {"repeat": "//////"}  # wasted work is shown by a pattern too
_WIDTH = 8.0  # inches: texts are then legible at half the size
_SMALL = 9  # points
_MOST_COLUMNS = 250  # with gaps between the iterations
_ROWS = 20  # numbers of requests at an axis, at most


def draw_timelines(timelines: Mapping[str, Timeline], unit: Unit = "iterations") -> Figure:
    """Draw a panel per timeline, with a row per request and a common axis.

    Args:
        timelines: timelines by the titles of their panels; `title` makes one.
        unit: unit of the axis: one column per iteration, or seconds since the first arrival.

    Raises:
        ConfigError: there is no timeline, a timeline has no iteration, or the unit is unknown.
    """
    if unit not in get_args(Unit):
        raise ConfigError(
            f"unit must be one of {', '.join(get_args(Unit))}, got {unit!r}", param="unit"
        )
    _check(timelines)
    heights = [
        0.75 + len(timeline.arrivals) * (0.19 if len(timeline.arrivals) <= 32 else 0.13)
        for timeline in timelines.values()
    ]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.8), layout="constrained")
    panels = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    kinds: set[SpanKind] = set()
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        kinds |= _draw_panel(axes, timeline, unit)
        head, _, text = name.partition("\n")
        axes.set_title(head, loc="left", fontsize=11, fontweight="bold", pad=19 if text else 6)
        axes.annotate(
            text,
            (0, 1),
            xytext=(0, 6),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=_SMALL,
        )
    panels[-1].set_xlabel(
        "iteration" if unit == "iterations" else "seconds since the first arrival"
    )
    figure.supylabel("requests, in order of arrival", fontsize=10)
    figure.legend(
        handles=_legend(kinds), loc="outside lower center", ncols=3, fontsize=10, frameon=False
    )
    return figure


def draw_latencies(timelines: Mapping[str, Timeline]) -> Figure:
    """Draw the seconds from arrival to answer of each request, with a mark per timeline. The axis is the arrival order.

    Raises:
        ConfigError: there is no timeline, or a timeline has no iteration.
    """
    _check(timelines)
    figure = Figure(figsize=(_WIDTH, 3.6), layout="constrained")
    axes = figure.subplots()
    schedulers = [
        f"{timeline.head.config.scheduler} {name}" for name, timeline in timelines.items()
    ]
    styles = curve_styles(schedulers)
    for scheduler, (name, timeline) in zip(schedulers, timelines.items(), strict=True):
        waits = [
            (row, timeline.ends[n].at - timeline.arrivals[n].at)
            for row, n in enumerate(timeline.arrivals, 1)
            if n in timeline.ends
        ]
        head = name.partition("\n")[0]
        mean = sum(seconds for _, seconds in waits) / len(waits) if waits else 0.0
        axes.plot(
            [row for row, _ in waits],
            [seconds for _, seconds in waits],
            marker=styles[scheduler].marker,
            color=styles[scheduler].color,
            linewidth=0.7,
            label=f"{head} (mean {mean:.2f} s)",
        )
    axes.set(xlabel="request, in order of arrival", ylabel="seconds to the answer")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=9)
    return figure


def title(timeline: Timeline, above: Timeline | None = None) -> str:
    """Return the title of a panel in two lines: the scheduler, then the numbers of requests, iterations and seconds.

    Args:
        timeline: the timeline of the panel.
        above: the timeline of the panel above, to which the numbers are related if it has as many requests.
    """
    name = timeline.head.config.scheduler
    style = SCHEDULERS.get(name)
    head = f"{style.title} ({name})" if style else name
    counts = f"{len(timeline.arrivals)} requests, {len(timeline.iterations)} iterations, {_seconds(timeline):.2f} s"
    if above is not None and len(above.arrivals) == len(timeline.arrivals):
        iterations = len(timeline.iterations) / max(1, len(above.iterations))
        seconds = _seconds(timeline) / _seconds(above)
        counts += f": {iterations:.0%} of the iterations and {seconds:.0%} of the time above"
    elif name == "request_level":
        counts += "; a prompt longer than the shortest of its batch takes one token per iteration"
    return f"{head}\n{counts}"


def _seconds(timeline: Timeline) -> float:
    """Seconds from the first arrival to the last end."""
    last = timeline.iterations[-1].collected if timeline.iterations else 0.0
    return max([end.at for end in timeline.ends.values()], default=last) - timeline.origin


def save_figure(figure: Figure, path: str) -> None:
    """Write a picture in the format of the suffix, .png or .svg.

    Raises:
        ConfigError: the path has another suffix, or the file cannot be written.
    """
    if not path.endswith((".png", ".svg")):
        raise ConfigError(
            f"plot must be a file name that ends in .png or .svg, got {path!r}", param="plot"
        )
    try:
        write_figure(figure, path, path[-3:], dpi=150)
    except OSError as error:
        raise ConfigError(
            f"{path!r} cannot be written: {reason_of(error)}", param="plot"
        ) from error


def _check(timelines: Mapping[str, Timeline]) -> None:
    if not timelines or not all(
        timeline.iterations and timeline.arrivals for timeline in timelines.values()
    ):
        raise ConfigError(
            "every timeline in a picture needs at least one iteration", param="timelines"
        )


def _draw_panel(axes: Axes, timeline: Timeline, unit: Unit) -> set[SpanKind]:
    edges = _edges(timeline, unit)
    spans = request_spans(timeline)
    boxes: dict[SpanKind, list[Sequence[tuple[float, float]]]] = {}
    for row, each in enumerate(spans.values(), 1):
        for span in each:
            boxes.setdefault(span.kind, []).append(_box(span, row, edges))
    for kind, corners in boxes.items():
        above = 3 if kind in _HEIGHTS else 1  # the gaps between columns are drawn in between, at 2
        hatch = _HATCHES.get(kind)
        edge = "white" if hatch else "none"  # the colour of the hatch
        axes.add_collection(
            PolyCollection(
                corners,
                facecolor=COLORS[kind],
                edgecolor=edge,
                hatch=hatch,
                linewidth=0,
                zorder=above,
            )
        )
    if unit == "iterations" and len(edges) <= _MOST_COLUMNS:
        lefts = [left for left, _ in edges]  # a thin gap between two iterations
        axes.vlines(lefts, 0.5, len(spans) + 0.5, color="white", linewidth=0.5, zorder=2)
    _draw_ends(axes, timeline, unit, list(spans))
    axes.set_xlim(0, None)
    axes.set_ylim(len(spans) + 0.6, 0.4)
    step = max(1, ceil_div(len(spans), _ROWS))
    axes.set_yticks(range(1, len(spans) + 1, step), [f"#{n}" for n in list(spans)[::step]])
    axes.tick_params(left=False, labelbottom=True, labelsize=_SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    style = SCHEDULERS.get(timeline.head.config.scheduler)
    axes.spines["left"].set(color=style.color if style else "white", linewidth=4)
    axes.spines["left"].set_position(("outward", 4))
    return set(boxes)


def _edges(timeline: Timeline, unit: Unit) -> list[tuple[float, float]]:
    """Return the begin and the end of each iteration on the axis."""
    if unit == "iterations":
        return [(float(index), index + 1.0) for index in range(len(timeline.iterations))]
    origin = timeline.origin
    return [
        (each.collected - each.device - origin, each.collected - origin)
        for each in timeline.iterations
    ]


def _box(
    span: Span, row: int, edges: Sequence[tuple[float, float]]
) -> Sequence[tuple[float, float]]:
    half = _HEIGHTS.get(span.kind, _FULL) / 2
    left = edges[span.first][0]
    right = edges[span.last][1]
    return (left, row - half), (right, row - half), (right, row + half), (left, row + half)


def _draw_ends(axes: Axes, timeline: Timeline, unit: Unit, numbers: Sequence[int]) -> None:
    """Mark the delivery of each answer."""
    origin = timeline.origin
    marks = []
    for row, n in enumerate(numbers, 1):
        if n in timeline.ends:
            at = timeline.ends[n].at
            done = sum(1 for each in timeline.iterations if each.collected <= at)
            marks.append((float(done) if unit == "iterations" else at - origin, row))
    places = [place for place, _ in marks]
    rows = [row for _, row in marks]
    axes.plot(
        places,
        rows,
        linestyle="none",
        marker="D",
        markersize=3.5,
        color="black",
        zorder=4,
        clip_on=False,
    )


def _legend(kinds: set[SpanKind]) -> list[Patch | Line2D]:
    """Return an entry for each drawn kind, and one for the ends."""
    handles: list[Patch | Line2D] = [
        Patch(
            facecolor=COLORS[kind],
            hatch=_HATCHES.get(kind),
            edgecolor="white",
            linewidth=0,
            label=label,
        )
        for kind, label in _LABELS.items()
        if kind in kinds
    ]
    done = Line2D(
        [],
        [],
        linestyle="none",
        marker="D",
        markersize=4,
        color="black",
        label="the answer is delivered",
    )
    return [*handles, done]
