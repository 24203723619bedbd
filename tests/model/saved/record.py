"""The files that `save_pretrained` of transformers writes, one record for each served class.

This module needs Python 3.11 alone: scripts/record_saved.py writes the records there.
"""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[2] / "fixtures" / "saved.json.gz"


class Saved(NamedTuple):
    """The config.json of a default configuration; that of a small model, and the shapes of its tensors."""

    default: dict[str, Any]
    config: dict[str, Any]
    shapes: Mapping[str, list[int]]


def load() -> dict[str, Saved]:
    """The records by `model_type`."""
    found = json.loads(gzip.decompress(FILE.read_bytes()))
    return {kind: Saved(**fields) for kind, fields in found.items()}


def save(records: Mapping[str, Saved]) -> None:
    """Write the records."""
    fields = {kind: record._asdict() for kind, record in records.items()}
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
    FILE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
