"""mapping.json: a table for a tree of one's own, or the options of a table for MaxText's trees."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca_jax.helpers.orbax_names import MAPPING
from orca_jax.model.trees.maxtext import MaxTextOptions
from orca_jax.model.trees.rows import LAYER, OPERATIONS, TreeOperation, TreeRow, TreeTable
from orca_jax.values.checks import did_you_mean, json_value, short
from orca_jax.values.errors import ConfigError

MAX_BYTES = 2**20

_TABLES = ("maxtext", "tunix")
_CHOICES: Mapping[str, tuple[object, ...]] = {
    "param_scan_axis": (0, 1),
    "rope_type": ("default", "llama3.1"),
    "normalize_embedding_logits": (False, True),
}
"""The values of the options of MaxText's table."""

_SHAPES = {
    "reshape": "a list of sizes",
    "transpose": "a list of axes",
    "halves": "an axis",
    "scale": "a number",
}
_SHAPES |= {
    "part": "a list of an axis, the first entry and the end, or null",
    "pick": "a list of an axis and an entry",
}


@dataclass(frozen=True)
class TreeMapping:
    """The contents of mapping.json: rows, or the name of a table with its options."""

    rows: TreeTable | None = None
    name: str | None = None
    options: MaxTextOptions | None = None


def read_mapping(directory: Path) -> TreeMapping | None:
    """Read mapping.json of a model directory; None without one.

    Raises:
        ConfigError: the file is not a mapping. The error names the row and the key.
    """
    path = directory / MAPPING
    if not path.exists():
        return None
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise _wrong(f"must be a regular file of at most {MAX_BYTES} bytes")
    try:
        content = json_value(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(f"cannot be read as JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict) or ("rows" in content) == ("table" in content):
        raise _wrong('must be a JSON object with either "rows" or "table"')
    if "rows" in content:
        return _own(content)
    return _known(content)


def _known(content: Mapping[str, Any]) -> TreeMapping:
    """A table by its name, with options."""
    _check_names(content, ("table", "options"), "")
    name = content["table"]
    options = content.get("options", {})
    if name not in _TABLES:
        raise _wrong(f"table must be one of {', '.join(_TABLES)}, got {short(name)}")
    if not isinstance(options, dict) or (options and name != "maxtext"):
        raise _wrong(
            f"options must be a JSON object, and only the table maxtext has any, got {short(options)}"
        )
    _check_names(options, tuple(_CHOICES), "options: ")
    for key, value in options.items():
        if not any(value == choice and type(value) is type(choice) for choice in _CHOICES[key]):
            known = ", ".join(json.dumps(choice) for choice in _CHOICES[key])
            raise _wrong(f"options: {key} must be one of {known}, got {short(value)}")
    return TreeMapping(name=name, options=MaxTextOptions(**options) if name == "maxtext" else None)


def _own(content: Mapping[str, Any]) -> TreeMapping:
    """A table of rows."""
    _check_names(content, ("rows", "ignore"), "")
    rows = content["rows"]
    ignored = content.get("ignore", [])
    if not isinstance(rows, list):
        raise _wrong(f"rows must be a list of JSON objects, got {short(rows)}")
    if not isinstance(ignored, list) or not all(isinstance(key, str) for key in ignored):
        raise _wrong("ignore must be a list of strings")
    table = TreeTable(
        MAPPING, tuple(_row(number, row) for number, row in enumerate(rows)), tuple(ignored)
    )
    paths = [row.path for row in table.rows]
    repeated = next((path for path in paths if paths.count(path) > 1), None)
    if repeated is not None:
        raise _wrong(f"{repeated} is the parameter of several rows")
    return TreeMapping(rows=table)


def _row(number: int, row: object) -> TreeRow:
    where = f"rows[{number}]"
    if not isinstance(row, dict):
        raise _wrong(f"{where} must be a JSON object, got {short(row)}")
    _check_names(row, ("source", "parameter", "layer_axis", "operations"), f"{where}: ")
    for key in ("source", "parameter"):
        if not isinstance(row.get(key), str) or not row[key]:
            raise _wrong(f"{where}: {key} must be a non-empty string, got {short(row.get(key))}")
    source = row["source"]
    path = row["parameter"]
    axis = row.get("layer_axis")
    changes = row.get("operations", [])
    if axis is not None and (not _is_number(axis) or LAYER in source):
        raise _wrong(
            f"{where}: layer_axis must be an integer from 0 on, and the source must have no {LAYER}"
        )
    if not isinstance(changes, list):
        raise _wrong(f"{where}: operations must be a list, got {short(changes)}")
    operations = tuple(
        _operation(f"{where}: operations[{place}]", change) for place, change in enumerate(changes)
    )
    return TreeRow(source.strip("/"), path, operations, axis)


def _operation(where: str, change: object) -> TreeOperation:
    """An operation, written as an object with one key: {"transpose": [1, 0]}."""
    if not isinstance(change, dict) or len(change) != 1:
        raise _wrong(f"{where} must be a JSON object with one key, got {short(change)}")
    ((name, value),) = change.items()
    if name not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise _wrong(f"{where}: {name} is not one of {known}{did_you_mean(name, OPERATIONS)}")
    values = value if isinstance(value, list) else [value]
    is_right = {
        "reshape": values.count(-1) <= 1
        and all(_is_number(size, 1) or size == -1 for size in values),
        "transpose": all(map(_is_number, values)),
        "part": len(values) == 3
        and all(map(_is_number, values[:2]))
        and (values[2] is None or _is_number(values[2])),
        "pick": len(values) == 2 and all(map(_is_number, values)),
        "halves": len(values) == 1 and _is_number(values[0]),
        "scale": len(values) == 1
        and isinstance(values[0], int | float)
        and not isinstance(values[0], bool),
    }
    if not is_right[name]:
        raise _wrong(f"{where}: {name} must be {_SHAPES[name]}, got {short(value)}")
    kind: Any = OPERATIONS[name]
    operation: TreeOperation = (
        kind(tuple(values)) if name in ("reshape", "transpose") else kind(*values)
    )
    return operation


def _is_number(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_names(content: Mapping[str, Any], known: Collection[str], where: str) -> None:
    unknown = next((key for key in content if key not in known), None)
    if unknown is not None:
        names = ", ".join(known)
        raise _wrong(f"{where}{unknown} is not one of {names}{did_you_mean(unknown, known)}")


def _wrong(problem: str) -> ConfigError:
    return ConfigError(f"{MAPPING}: {problem}", param="model")
