"""Draws latencies over throughput, a point for each rate."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from math import nan
from operator import itemgetter
from typing import Any

from orca_jax.errors import ConfigError
from orca_jax.reporting import write_figure

STEADY = "steady_request_throughput"
WHOLE = "request_throughput"  # for passes without a steady part
PANELS = {
    "normalised latency, ms/token": (
        ("median_normalized_latency_ms", "median", "o-"),
        ("p90_normalized_latency_ms", "p90", "s--"),
        ("p99_normalized_latency_ms", "p99", "^:"),
    ),
    "latency, ms": (
        ("median_ttft_ms", "median TTFT", "o-"),
        ("p99_ttft_ms", "p99 TTFT", "^:"),
        ("median_tpot_ms", "median TPOT", "s-"),
        ("p99_tpot_ms", "p99 TPOT", "v:"),
    ),
}


def need_plots() -> None:
    """Check for matplotlib. Raises ConfigError; `param` is "plot"."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot needs matplotlib: pip install 'orca-jax[plot]'", param="plot")


def plot_passes(path: str, passes: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw percentiles of the normalised latency, TTFT and TPOT over the measured throughput.

    Raises:
        ConfigError: the file cannot be written, or its ending is unknown; `param` is "plot".
    """
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    points = sorted(((result[STEADY] or result[WHOLE], result) for result in passes), key=itemgetter(0))
    throughput = [requests for requests, _ in points]
    for (label, curves), axes in zip(PANELS.items(), figure.subplots(1, 2), strict=True):
        for name, shown, style in curves:
            axes.plot(throughput, [result[name] or nan for _, result in points], style, label=shown)
        axes.set(xlabel="throughput, requests/s", ylabel=label, yscale="log")
        axes.set_xlim(left=0)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    try:
        write_figure(figure, path, format=os.path.splitext(path)[1][1:] or "svg")
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot {path!r} cannot be written: {error}", param="plot") from error
