"""Runs the parts one after the other, each in a process of its own with a time limit, and reports."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from device_check.part import Kind
from device_check.tables import side_by_side, tables

BUDGET = 465.0  # seconds for all parts
NO_DEVICE = 3  # exit status of a part without a device, and of no other failure


@dataclass(frozen=True)
class Part:
    """A process: its name and its limit in seconds."""

    name: str
    seconds: float


PARTS: dict[Kind, tuple[Part, ...]] = {
    "gpu": (
        Part("machine", 60),
        Part("correct:gpu", 90),
        Part("speed:gpu", 80),
        Part("step:llama-3-8b", 110),
        Part("serve:orca", 90),
        Part("peer:continuous", 80),
        Part("correct:triton", 60),
        Part("speed:triton", 50),
        Part("peer:static", 80),
        Part("step:gpt2-xl", 80),
        Part("speed:cudnn", 40),
        Part("speed:gather", 40),
        Part("correct:xla", 60),
    ),
    "tpu": (
        Part("machine", 60),
        Part("correct:tpu", 120),
        Part("speed:tpu", 80),
        Part("step:llama-3-8b", 110),
        Part("serve:orca", 90),
        Part("correct:write", 90),
        Part("step:gpt2-xl", 80),
        Part("speed:gather", 40),
        Part("correct:xla", 60),
        Part("peer:continuous", 10),
    ),
}
FALLBACK: dict[Kind, str] = {
    "gpu": "triton",
    "tpu": "xla",
}  # attention of whole steps if the device's own fails


class NoDevice(Exception):
    """JAX finds no such device; the message says what to do."""


def run_parts(args: argparse.Namespace) -> int:
    """Run the parts; print and save each as it ends. Returns 1 if one failed, 2 without a device."""
    limits = {part.name: part.seconds for part in PARTS[args.kind]}
    results: dict[str, Any] = {}
    report = {"check": args.kind, "dry_run": args.dry_run, "seconds": 0.0, "parts": results}
    start = time.monotonic()
    for name in args.parts:
        limit = min(limits[name], BUDGET - (time.monotonic() - start))
        print(f"\n{name}", end="", flush=True)
        try:
            results[name] = run_part(args, name, limit, attention_for_steps(args, results))
        except NoDevice as reason:
            print(f"\nerror: {reason}", file=sys.stderr)
            return 2
        add_shares(results[name]["rows"], results.get("machine"))
        print_result(results[name])
        report["seconds"] = round(time.monotonic() - start, 1)
        (args.out / "result.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    if together := side_by_side(results):
        print(f"\nside by side\n{together}")
    wrong = [name for name, result in results.items() if not result["ok"]]
    print(f"\n{'failed: ' + ', '.join(wrong) if wrong else 'all ok'}, {report['seconds']} s; files in {args.out}")
    print(json.dumps(report))
    return 1 if wrong else 0


def run_part(args: argparse.Namespace, name: str, limit: float, attention: str | None) -> dict[str, Any]:
    """Run one part; a failure, a time limit or a kill becomes part of the result.

    Raises:
        NoDevice: the part found no device.
    """
    stem = name.replace(":", "-")
    rows_file, log_file = args.out / f"{stem}.jsonl", args.out / f"{stem}.log"
    rows_file.unlink(missing_ok=True)
    if limit < 5:
        return {"ok": False, "seconds": 0.0, "error": "no time was left", "rows": []}
    start, error = time.monotonic(), None
    with log_file.open("wb") as log:
        try:
            code = subprocess.run(
                command(args, name, attention), stdout=log, stderr=log, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            error = f"stopped after {limit:.0f} s"
        else:
            lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else "no output"
            if code == NO_DEVICE:
                raise NoDevice(last)
            error = f"exit {code}: {last}; see {log_file}" if code else None
    rows = [json.loads(row) for row in rows_file.read_text(encoding="utf-8").splitlines()] if rows_file.exists() else []
    error = error or next((row["error"] for row in rows if "error" in row), None)
    return {"ok": error is None, "seconds": round(time.monotonic() - start, 1), "error": error, "rows": rows}


def command(args: argparse.Namespace, name: str, attention: str | None) -> list[str]:
    """The command line for the process of a part."""
    words = [sys.executable, "-m", str(__package__), args.kind, "--child", name, "--out", str(args.out)]
    words += ["--dry-run"] * args.dry_run
    words += ["--attention", attention] if attention else []
    return words + (["--model", args.model] if args.model else [])


def add_shares(rows: list[dict[str, Any]], machine: dict[str, Any] | None) -> None:
    """Add rates as shares of the measured rates of this device."""
    reached = {key: value for row in (machine["rows"] if machine else ()) for key, value in row.items()}
    for row in rows:
        for rate, most in (("bytes_per_s", "copy_bytes_per_s"), ("flop_per_s", "matmul_flop_per_s")):
            if rate in row and most in reached:
                row[f"share_of_{most.split('_')[0]}"] = row[rate] / reached[most]


def attention_for_steps(args: argparse.Namespace, results: dict[str, Any]) -> str | None:
    """The attention of whole steps: another implementation if the device's own failed on this machine."""
    kernels = results.get(f"correct:{args.kind}")
    if args.attention or args.dry_run or kernels is None or kernels["ok"]:
        return str(args.attention) if args.attention else None
    return FALLBACK[args.kind]


def print_result(result: dict[str, Any]) -> None:
    """Print a line and tables, for reading."""
    rows = result["rows"]
    state = "skipped" if rows and all("skipped" in row for row in rows) else "ok"
    print(f": {state if result['ok'] else 'FAILED (' + result['error'] + ')'}, {result['seconds']} s", flush=True)
    if rows:
        print(tables(rows), flush=True)
