"""Figures for people: percentiles, tables, and the hardware under them."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def print_table(title: str, rows: Mapping[str, Any]) -> None:
    """Names and figures, aligned."""
    print(title)
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value:,.4g}" if isinstance(value, float) else f"  {name:<{width}}  {value}")


def hardware() -> dict[str, Any]:
    """What this runs on."""
    import jax

    devices = jax.devices()
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
