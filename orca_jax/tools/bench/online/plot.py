"""Draws latencies over throughput, a point for each rate."""

from collections.abc import Mapping, Sequence
from math import nan
from operator import itemgetter
from typing import Any

from orca_jax.helpers.reporting import new_figure, save_plot, use_plain_numbers

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


def plot_passes(path: str, passes: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw percentiles of the normalised latency, TTFT and TPOT over the measured throughput.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written, or its ending is unknown; `param` is "plot".
    """
    figure = new_figure(9, 4)
    figure.suptitle(title)
    points = sorted(
        ((result[STEADY] or result[WHOLE], result) for result in passes), key=itemgetter(0)
    )
    throughput = [requests for requests, _ in points]
    fewest = min([result.get("completed", 0) for result in passes])
    few = f" (of {fewest} requests)" if fewest < 100 else ""
    for (label, curves), axes in zip(PANELS.items(), figure.subplots(1, 2), strict=True):
        for name, shown, style in curves:
            curve = [result[name] or nan for _, result in points]
            axes.plot(throughput, curve, style, label=shown + few if "p99" in shown else shown)
        axes.set(xlabel="throughput, requests/s", ylabel=label, yscale="log")
        axes.set_xlim(left=0)
        use_plain_numbers(axes.yaxis)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()
    save_plot(figure, path)
