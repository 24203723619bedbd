"""Reports of measurements: percentiles, tables and the hardware."""

import errno
import importlib.util
import math
import os
import platform
import stat
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

from orca_jax.helpers.processor import cpu_flags, cpu_name
from orca_jax.values.errors import ConfigError

_DARK = b"@media (prefers-color-scheme: dark) {svg {filter: invert(0.9) hue-rotate(180deg)}}"
READER_SECONDS = 3.0  # for a reader of a pipe to come
NO_MATPLOTLIB = "plot needs matplotlib: pip install 'orca-jax[plot]'"


class Picture(Protocol):
    """A figure of matplotlib."""

    def savefig(self, fname: Any, **options: Any) -> object:
        """Write it to a file object."""
        ...


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile: at least `percent` % of the values are at most as large."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def p99_name(count: int) -> str:
    """The name of the 99th percentile of so many values: below 100 values it is the largest one."""
    if count >= 100:
        return "p99"
    return f"largest of {count:,}"


def name_tails(figures: Mapping[str, Any], count: int, gaps: int) -> dict[str, Any]:
    """Name each `p99_` figure of few values what it is: the largest one.

    Args:
        figures: figures with nearest-rank percentiles.
        count: number of requests.
        gaps: number of gaps between tokens, for the figures of these.
    """
    numbers = {name: gaps if "itl" in name or "inter_token" in name else count for name in figures}
    tails = {name: p99_name(number) for name, number in numbers.items() if name.startswith("p99_")}
    few = {name: f"{name} ({tail})" for name, tail in tails.items() if tail != "p99"}
    return {few.get(name, name): value for name, value in figures.items()}


def rounded(value: Any) -> Any:
    """Return the same value with floats of five digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}")


def print_table(title: str, rows: Mapping[str, Any]) -> None:
    """Print a title and a line per figure, with aligned columns."""
    print(title)
    width = max(map(len, rows))
    for name, value in rows.items():
        if isinstance(value, float):
            value = f"{value:,.4g}"
        print(f"  {name:<{width}}  {value}")


def print_warning(message: str | None) -> None:
    """Print a warning, if there is one, among the tables: a saved report then holds it too."""
    if message is not None:
        print(f"warning: {message}")


def write_file(path: str | Path, data: bytes) -> None:
    """Replace a file, completely or not at all. A pipe or a device is written to directly.

    Raises:
        OSError: it cannot be written, or is a pipe that has no reader for `READER_SECONDS`.
    """
    target = Path(os.path.realpath(path))  # a symbolic link stays
    if target.exists() and not target.is_file():
        with open(_with_reader(target), "wb") as file:
            file.write(data)
        return
    beside = target.with_name(f".{target.name}.part")
    try:
        beside.write_bytes(data)
        if target.exists():
            beside.chmod(stat.S_IMODE(target.stat().st_mode))
        beside.replace(target)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _with_reader(target: Path) -> int:
    """Open a pipe or a device for writing. Raises OSError."""
    last = time.monotonic() + READER_SECONDS
    while True:
        try:
            # else it waits for ever
            descriptor = os.open(target, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > last:
                raise
            time.sleep(0.05)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


def write_figure(figure: Picture, path: str, kind: str, **options: Any) -> None:
    """Write a picture of a kind such as "svg" as `write_file` does. Equal figures are equal files. Raises OSError.

    A reader with dark colours gets dark ones in an SVG: white becomes nearly black, and hues stay.
    """
    from matplotlib import rc_context

    metadata = {"svg": {"Date": None}, "png": {"Software": None}}.get(kind)
    picture = BytesIO()
    # texts are texts, and ids do not change
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "orca-jax"}):
        figure.savefig(picture, format=kind, metadata=metadata, **options)
    content = picture.getvalue()
    if kind == "svg":
        content = content.replace(b"</style>", _DARK + b"</style>", 1)
    write_file(path, content)


def need_matplotlib() -> None:
    """Check for matplotlib. Raises ConfigError; `param` is "plot"."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(NO_MATPLOTLIB, param="plot")


def new_figure(width: float, height: float) -> Any:
    """Make an empty figure of a size in inches. Raises ConfigError without matplotlib; `param` is "plot"."""
    need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def use_plain_numbers(axis: Any) -> None:
    """Write plain numbers at the logarithmic axis of a finished plot, and more of them at a short axis."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    if high > 120 * low:
        subs = (1,)
    elif high > 15 * low:
        subs = (1, 2, 5)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def save_plot(figure: Picture, path: str) -> None:
    """Write a figure of `--plot` in the format of the path's ending, SVG without one.

    Raises:
        ConfigError: the file cannot be written, or its ending is unknown; `param` is "plot".
    """
    try:
        write_figure(figure, path, os.path.splitext(path)[1][1:] or "svg", dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plot {path!r} cannot be written: {error}", param="plot") from error


def hardware() -> dict[str, Any]:
    """Describe the processor, the devices and the versions of JAX and Python."""
    import jax

    devices = jax.devices()
    return {
        "cpu": cpu_name(),
        "cpu_flags": cpu_flags(),
        "cores": os.cpu_count(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
