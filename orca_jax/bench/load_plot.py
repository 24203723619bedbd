"""Draws throughput and latencies over arrival rates."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import nan
from typing import Protocol

from orca_jax.errors import ConfigError
from orca_jax.reporting import new_figure, save_plot

PANELS = {
    "output_tokens_per_s": "output tokens/s",
    "median_normalized_latency_ms": "median normalised latency, ms/token",
    "p99_ttft_ms": "p99 time to first token, ms",
    "p99_itl_ms": "p99 inter-token latency, ms",
}
LINEAR = ("output_tokens_per_s",)
MARKERS = "os^Dv<>p"


class HasResults(Protocol):
    """One arrival rate with its results."""

    @property
    def rate(self) -> float | None:
        """Requests per second; None: all at once, which is not drawn."""

    @property
    def results(self) -> Mapping[str, Mapping[str, float]]:
        """Figures by contestant."""


def plot_loads(path: str, loads: Sequence[HasResults], title: str) -> None:
    """Draw four panels over the rate, with a curve per contestant.

    Raises:
        ConfigError: there is no rate to draw, matplotlib is missing, or the file cannot be written; `param` is "plot".
    """
    figure = new_figure(11, 8)
    rates = sorted((load.rate, load.results) for load in loads if load.rate is not None)
    if not rates:
        raise ConfigError("plot needs arrival rates; give --load", param="plot")
    figure.suptitle(title)
    panels = figure.subplots(2, 2).flat
    for (name, label), axes in zip(PANELS.items(), panels, strict=True):
        for contestant, marker in zip(rates[0][1], cycle(MARKERS), strict=False):
            points = [results[contestant][name] or nan for _, results in rates]  # 0: all tokens are delivered at once
            axes.plot([rate for rate, _ in rates], points, marker=marker, label=contestant)
        axes.set(xlabel="arrivals, requests/s", ylabel=label, yscale="linear" if name in LINEAR else "log")
        axes.set_xlim(left=0)
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    save_plot(figure, path, "png", dpi=120)
