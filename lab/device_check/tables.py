"""Results as text: consecutive rows of one shape form a table; results of several parts stand side by side."""

from collections.abc import Callable, Iterable
from itertools import chain, groupby
from typing import Any

Row = dict[str, Any]

_UNITS: dict[str, tuple[str, Callable[[float], str]]] = {
    "bytes_per_s": ("GB/s", lambda x: f"{x / 1e9:.4g}"),
    "copy_bytes_per_s": ("copy GB/s", lambda x: f"{x / 1e9:.4g}"),
    "flop_per_s": ("TFLOP/s", lambda x: f"{x / 1e12:.3g}"),
    "matmul_flop_per_s": ("matmul TFLOP/s", lambda x: f"{x / 1e12:.3g}"),
    "share_of_copy": ("of copy", lambda x: f"{x:.1%}"),
    "share_of_matmul": ("of matmul", lambda x: f"{x:.1%}"),
    "mbu": ("MBU", lambda x: f"{x:.1%}"),
    "idle_share_at_most": ("idle at most", lambda x: f"{x:.1%}"),
    "weight_bytes": ("weights GiB", lambda x: f"{x / 2**30:.2f}"),
    "us": ("us", lambda x: f"{x:.1f}"),
    "output_tokens_per_s": ("output/s", lambda x: f"{x:.0f}"),
    "total_tokens_per_s": ("all tokens/s", lambda x: f"{x:.0f}"),
    "tokens_per_s": ("tokens/s", lambda x: f"{x:.0f}"),
}


def tables(rows: Iterable[Row]) -> str:
    """Format all rows; consecutive rows with the same keys share one heading."""
    return "\n".join(_table(list(group)) for _, group in groupby(rows, key=tuple))


def side_by_side(parts: dict[str, Any]) -> str:
    """Each implementation's share of a copy (increments) or of a product (chunks), and the systems on the trace."""
    shares: dict[tuple[Any, ...], Row] = {}
    systems = []
    for name, part in parts.items():
        kind, _, what = name.partition(":")
        for row in part["rows"]:
            reached = row.get("share_of_copy", row.get("share_of_matmul"))
            if kind == "speed" and reached is not None:
                about = {
                    key: row[key]
                    for key in ("phase", "rows", "tokens", "context", "page")
                    if key in row
                }
                shares.setdefault(tuple(about.values()), about)[row.get("system", what)] = (
                    f"{reached:.1%}"
                )
            if "output_tokens_per_s" in row and "error" not in row:
                system = row["system"] + (f", batches of {row['batch']}" if "batch" in row else "")
                systems.append(
                    {"system": system}
                    | {key: row[key] for key in ("model", "seconds", "output_tokens_per_s")}
                )
    names = list(dict.fromkeys(chain.from_iterable(shares.values())))
    full = [{name: row.get(name, "-") for name in names} for row in shares.values()]
    return "\n".join(_table(rows) for rows in (full, systems) if rows)


def _table(rows: list[Row]) -> str:
    headings = [_UNITS[key][0] if key in _UNITS else key.replace("_", " ") for key in rows[0]]
    lines = [headings]
    for row in rows:
        lines.append([_text(key, value) for key, value in row.items()])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [isinstance(value, int | float) for value in rows[0].values()]
    shown = []
    for line in lines:
        cells = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        shown.append("   " + "  ".join(cells).rstrip())
    return "\n".join(shown)


def _text(key: str, value: object) -> str:
    if key in _UNITS and isinstance(value, int | float):
        return _UNITS[key][1](value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:160]
