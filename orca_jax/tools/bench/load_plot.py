"""Draws throughput and latencies over arrival rates."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Protocol

from orca_jax.helpers.reporting import new_figure, p99_name, save_plot, use_plain_numbers
from orca_jax.timeline.palette import NEUTRAL, curve_styles
from orca_jax.values.errors import ConfigError

PANELS = {
    "output_tokens_per_s": "output tokens/s",
    "median_normalized_latency_ms": "latency by token, median, ms",
    "p99_ttft_ms": "time to first token, {tail}, ms",
    "p99_itl_ms": "between tokens, p99, ms",
}
"""Titles of panels by figure; `tail` is the name of a 99th percentile of the requests."""
LINEAR = ("output_tokens_per_s",)


class HasResults(Protocol):
    """One arrival rate with its results."""

    @property
    def load(self) -> float | None:
        """The rate as a multiple of the first contestant's saturation."""

    @property
    def rate(self) -> float | None:
        """Requests per second; None: all at once, which is not drawn."""

    @property
    def results(self) -> Mapping[str, Mapping[str, float]]:
        """Figures by contestant."""


def plot_loads(path: str, loads: Sequence[HasResults], title: str, num_requests: int) -> None:
    """Draw four panels over the rate, with a curve per contestant and a line at the first contestant's saturation.

    A figure of 0 is left out: all tokens of a request are then delivered at once.

    Raises:
        ConfigError: there is no rate to draw, matplotlib is missing, or the file cannot be written; `param` is "plot".
    """
    figure = new_figure(8, 7)
    rated = [load for load in loads if load.rate is not None]
    rates = sorted((load.rate or 0.0, load.results) for load in rated)
    if not rates:
        raise ConfigError("there are no arrival rates to draw", param="plot")
    first = next(iter(rates[0][1]))
    saturation = next(((load.rate or 0.0) / load.load for load in rated if load.load), None)
    styles = curve_styles(rates[0][1])
    figure.suptitle(title)
    for (name, label), axes in zip(PANELS.items(), figure.subplots(2, 2).flat, strict=True):
        for contestant, style in styles.items():
            points = [results[contestant][name] or nan for _, results in rates]
            axes.plot([rate for rate, _ in rates], points, style.dashes, color=style.color, marker=style.marker,
                      label=contestant)  # fmt: skip
            if not any(results[contestant][name] for _, results in rates):
                axes.text(
                    0.03,
                    0.94,
                    f"{contestant}: all at once",
                    color=style.color,
                    transform=axes.transAxes,
                )
        is_linear = name in LINEAR
        scale = "" if is_linear else " (log)"
        axes.set_title(label.format(tail=p99_name(num_requests)) + scale, fontsize=11)
        axes.set(xlabel="arrivals, requests/s", yscale="linear" if is_linear else "log")
        axes.set_xlim(left=0)
        if is_linear:
            axes.set_ylim(bottom=0)
        else:
            use_plain_numbers(axes.yaxis)
        if saturation is not None:
            axes.axvline(
                saturation,
                color=NEUTRAL,
                linestyle="--",
                linewidth=1,
                label=f"saturation of {first}",
            )
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(4, len(styles) + 1)
    )
    save_plot(figure, path)
