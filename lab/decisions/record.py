"""The record of all measurements of decisions, `docs/measured/decisions.json`: a section for each command."""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from orca_jax.helpers.reporting import hardware

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "docs" / "measured" / "decisions.json"


def add_save(parser: argparse.ArgumentParser) -> None:
    """Add the flag that saves a result."""
    parser.add_argument("--save", type=Path, metavar="FILE", help="update this record (JSON)")
    parser.add_argument(
        "--note", default="", metavar="TEXT", help="a remark in the record, such as busy"
    )


def finish(args: argparse.Namespace, section: str, name: str, result: dict[str, Any]) -> None:
    """Print a result as a line of JSON, and save it if the command line says so.

    Args:
        args: the arguments of `add_save`.
        section: the kind of measurement.
        name: what was measured, such as a model.
        result: the figures.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    whole = {**result, "date": today, "note": args.note, "machine": hardware()}
    print(json.dumps({section: {name: whole}}))
    if args.save is None:
        return
    record = {}
    if args.save.exists():
        record = json.loads(args.save.read_text(encoding="utf-8"))
    record.setdefault(section, {})[name] = whole
    args.save.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
