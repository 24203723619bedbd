"""Runs the parts one after the other, each in a process of its own with a time limit, and reports after each."""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lab.device_check.part import Kind
from lab.device_check.tables import side_by_side, tables
from orca_jax.helpers.reporting import write_file

NO_DEVICE = 3  # exit status of a part without a device, and of no other failure
RECOVERY = 5.0  # seconds for a device after a process that was killed, or that did not find it
LEAST = 5.0  # seconds for which a part is started
MOST_LOG = 4 << 20  # bytes kept of the log of a part, from its end

Group = Literal["kernels", "steps", "curves"]
GROUPS: dict[Group, float] = {"kernels": 540.0, "steps": 540.0, "curves": 540.0}
"""The groups of parts by worth, each for one command, and the seconds for all parts of it."""


LEASES: dict[str, dict[Kind, dict[str, float]]] = {
    "lease": {
        "gpu": {
            "machine": 30,
            "correct:gpu": 130,
            "step:llama-3-8b": 160,
            "experts": 60,
            "tune:gpu": 60,
            "speed:gpu": 60,
        },
        "tpu": {
            "machine": 30,
            "correct:tpu": 130,
            "step:llama-3-8b": 160,
            "correct:write": 70,
            "experts": 50,
            "speed:tpu": 60,
        },
    },
    "lease_engine": {
        "gpu": {"machine": 25, "engine:llama-3-8b": 140},
        "tpu": {"machine": 25, "engine:llama-3-8b": 140},
    },
}
"""Parts by worth, each with its limit in seconds, for a device that is at hand for 15 minutes."""
LEASE_SECONDS = {"lease": 530.0, "lease_engine": 175.0}
"""For all parts of each."""


@dataclass(frozen=True)
class Part:
    """A process: its name, its limit in seconds, and its group."""

    name: str
    seconds: float
    group: Group
    tool: tuple[str, ...] = ()  # a program in front of the process; without it the part is skipped
    after: str | None = None  # run only if this part failed, for the case that it ran last
    kind: str | None = None  # the process run by the tool, if it differs from the name
    spare: bool = False  # run if time is left; the limits of all others fit into the group


MACHINE = Part("machine", 45, "kernels")  # in every group
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--print-limit", "20")
COUNTERS = (
    "ncu",
    "--set",
    "basic",
    "--clock-control",
    "none",
    "-k",
    "regex:increments|chunks",
    "-c",
    "4",
)

PARTS: dict[Kind, tuple[Part, ...]] = {
    "gpu": (
        MACHINE,
        Part("correct:gpu", 150, "kernels"),
        Part("memcheck:gpu", 60, "kernels", MEMCHECK, after="correct:gpu", kind="correct:gpu"),
        Part("speed:gpu", 130, "kernels"),
        Part("tune:gpu", 100, "kernels"),
        Part("experts", 60, "kernels", spare=True),
        Part("states", 60, "kernels", spare=True),
        Part("correct:triton", 80, "kernels", spare=True),
        Part("speed:others", 90, "kernels", spare=True),
        Part("correct:gather", 40, "kernels", spare=True),
        Part("counters:gpu", 60, "kernels", COUNTERS, spare=True),
        Part("step:llama-3-8b", 240, "steps"),
        Part("serve:orca", 150, "steps"),
        Part("peer:continuous", 80, "steps"),
        Part("engine:llama-3-8b", 150, "curves"),
        Part("curves:fig10", 170, "curves"),
        Part("variants:llama-3-8b", 150, "curves"),
        Part("peer:static", 80, "curves", spare=True),
        Part("step:gpt2-xl", 120, "curves", spare=True),
    ),
    "tpu": (
        MACHINE,
        Part("correct:tpu", 150, "kernels"),
        Part("speed:tpu", 130, "kernels"),
        Part("correct:write", 100, "kernels"),
        Part("correct:xla", 60, "kernels"),
        Part("experts", 60, "kernels", spare=True),
        Part("states", 60, "kernels", spare=True),
        Part("speed:dense", 40, "kernels", spare=True),
        Part("step:llama-3-8b", 240, "steps"),
        Part("serve:orca", 150, "steps"),
        Part("peer:continuous", 10, "steps"),
        Part("engine:llama-3-8b", 150, "curves"),
        Part("curves:fig10", 170, "curves"),
        Part("step:gpt2-xl", 120, "curves", spare=True),
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
    known = {part.name: part for part in PARTS[args.kind]}
    results: dict[str, Any] = {}
    before = found_before(args)
    report: dict[str, Any] = {
        "check": args.kind,
        "dry_run": args.dry_run,
        "seconds": 0.0,
        "parts": results,
    }
    longer = max(1.0, args.seconds / sum(GROUPS.values()))
    start = time.monotonic()
    for name in args.parts:
        seconds = args.limits.get(name, known[name].seconds)
        part = replace(known[name], seconds=longer * seconds)
        limit = min(part.seconds, args.seconds - (time.monotonic() - start) - RECOVERY)
        print(f"\n{name}", end="", flush=True)
        try:
            results[name] = run_part(args, part, limit, before | results)
        except NoDevice as reason:
            if not results:
                print(f"\nerror: {reason}", file=sys.stderr)
                return 2
            # The device may need time after a part that was killed.
            results[name] = {"ok": False, "seconds": 0.0, "error": str(reason), "rows": []}
            time.sleep(RECOVERY)
        if name == "machine" and device_of(results) not in (None, device_of(before)):
            before.clear()  # results of another device
        add_shares(results[name]["rows"], (before | results).get("machine"))
        print_result(results[name])
        report["seconds"] = round(time.monotonic() - start, 1)
        save(args, report | {"parts": before | results})
    wrong = [name for name, result in results.items() if not result["ok"]]
    print(
        f"\n{'failed: ' + ', '.join(wrong) if wrong else 'all ok'}, {report['seconds']} s; files in {args.out}"
    )
    if args.json:
        print(json.dumps(report | {"parts": before | results}))
    return 1 if wrong else 0


def found_before(args: argparse.Namespace) -> dict[str, Any]:
    """The parts of earlier commands with the same `--out`; empty if there are none."""
    try:
        report = json.loads((args.out / "result.json").read_bytes())
        same = (report["check"], report["dry_run"]) == (args.kind, args.dry_run)
        return dict(report["parts"]) if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def device_of(results: dict[str, Any]) -> object:
    """The name of the device that parts were run on; None if it is not known."""
    rows = results["machine"]["rows"] if "machine" in results else []
    return rows[0].get("device") if rows else None


def run_part(
    args: argparse.Namespace, part: Part, limit: float, results: dict[str, Any]
) -> dict[str, Any]:
    """Run one part; a failure, a time limit or a kill becomes part of the result, with the rows written before.

    Raises:
        NoDevice: the part found no device.
    """
    rows_file, log_file = files_of(args.work, part.name)
    rows_file.unlink(missing_ok=True)
    if reason := needless(part, args, results):
        return {"ok": True, "seconds": 0.0, "error": None, "rows": [{"skipped": reason}]}
    if part.spare and limit < part.seconds / 2:
        return {
            "ok": True,
            "seconds": 0.0,
            "error": None,
            "rows": [{"skipped": "no time was left"}],
        }
    if limit < LEAST:
        return {"ok": False, "seconds": 0.0, "error": "no time was left", "rows": []}
    start = time.monotonic()
    error = None
    with log_file.open("wb") as log:
        words = command(args, part, results)
        variables = environment(args, part)
        process = subprocess.Popen(
            words, stdout=log, stderr=log, env=variables, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            error = f"stopped after {limit:.0f} s, during: {last_line(log_file)}"
            end(process)
        except BaseException:  # for instance Ctrl-C, which a session of its own does not get
            end(process)
            raise
        else:
            if code == NO_DEVICE:
                raise NoDevice(last_line(log_file))
            error = (
                f"exit {code}: {last_line(log_file)}; see {part.name}.log in logs.tgz"
                if code
                else None
            )
    rows = read_rows(rows_file)
    error = error or next((row["error"] for row in rows if "error" in row), None)
    return {
        "ok": error is None,
        "seconds": round(time.monotonic() - start, 1),
        "error": error,
        "rows": rows,
    }


def end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its children, and give the device time. A process that waits for a dead device may stay."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(RECOVERY)
    except subprocess.TimeoutExpired:
        return


def needless(part: Part, args: argparse.Namespace, results: dict[str, Any]) -> str | None:
    """The reason for leaving out a part, or None."""
    if part.after is not None and results.get(part.after, {"ok": True})["ok"]:
        return f"{part.after} has no failed case"
    if part.tool and shutil.which(part.tool[0]) is None and not args.dry_run:
        return f"{part.tool[0]} is not installed"
    return None


def files_of(work: Path, name: str) -> tuple[Path, Path]:
    """The files of a part: its rows and its log."""
    stem = name.replace(":", "-")
    return work / f"{stem}.jsonl", work / f"{stem}.log"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a part; a last line cut by a kill is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def last_line(log: Path) -> str:
    """The last line of a log: of a stopped part, the name of the case that it was running."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def environment(args: argparse.Namespace, part: Part) -> dict[str, str]:
    """Variables of a part: all share one cache of programs, and of XLA's choices of algorithms."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(args.work / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONUNBUFFERED": "1"}
    # in one pool memcheck sees no access beyond an array, and ncu saves the whole pool for each
    # pass
    if part.tool:
        cache |= {
            "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
    if args.kind == "gpu" and "CUDA_ROOT" not in os.environ and (root := cuda_root()) is not None:
        cache["CUDA_ROOT"] = root
    return os.environ | cache


def cuda_root() -> str | None:
    """The folder of CUDA by `nvcc`, if the package in which JAX looks for `ptxas` is missing or has none.

    JAX 0.11 then has no path, or the text "None", and XLA may find no assembler. None: there is no need, or no `nvcc`.
    """
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):  # JAX takes the first that is there
        with contextlib.suppress(ModuleNotFoundError):
            if (spec := importlib.util.find_spec(package)) is not None:
                if any(
                    (Path(place) / "bin" / "ptxas").exists()
                    for place in spec.submodule_search_locations or ()
                ):
                    return None
                break
    nvcc = shutil.which("nvcc")
    return None if nvcc is None else str(Path(nvcc).resolve().parent.parent)


def command(args: argparse.Namespace, part: Part, results: dict[str, Any]) -> list[str]:
    """The command line for the process of a part."""
    words = [] if args.dry_run else list(part.tool)
    words += [
        sys.executable,
        "-m",
        str(__package__),
        args.kind,
        "--child",
        part.name,
        "--work",
        str(args.work),
    ]
    words += ["--measure", part.kind or part.name, *(["--dry-run"] if args.dry_run else [])]
    attention = attention_for_steps(args, results)
    words += ["--attention", attention] if attention else []
    if part.after is not None:
        words += ["--case", failed_case(args, part.after, results)]
    return words + (["--model", args.model] if args.model else [])


def failed_case(args: argparse.Namespace, name: str, results: dict[str, Any]) -> str:
    """The first case of a part with an error, or else the one that it was running at its end."""
    wrong = next(
        (row["case"] for row in results[name]["rows"] if "error" in row and "case" in row), None
    )
    return wrong or last_line(files_of(args.work, name)[1]).removeprefix("running ")


def add_shares(rows: list[dict[str, Any]], machine: dict[str, Any] | None) -> None:
    """Add rates as shares of the measured rates of this device."""
    reached: dict[str, Any] = {}
    for row in machine["rows"] if machine else ():
        reached |= row
    for row in rows:
        for rate, most in (
            ("bytes_per_s", "copy_bytes_per_s"),
            ("flop_per_s", "matmul_flop_per_s"),
        ):
            if rate in row and most in reached:
                row[f"share_of_{most.split('_')[0]}"] = row[rate] / reached[most]


def attention_for_steps(args: argparse.Namespace, results: dict[str, Any]) -> str | None:
    """The attention of whole steps: another implementation if the device's own failed on this machine."""
    kernels = results.get(f"correct:{args.kind}")
    if args.attention or args.dry_run or kernels is None or kernels["ok"]:
        return str(args.attention) if args.attention else None
    return FALLBACK[args.kind]


def print_result(result: dict[str, Any]) -> None:
    """Print a line and tables, for reading; single kernels of profiles are in the files alone."""
    print(f": {state_of(result)}, {result['seconds']} s", flush=True)
    if rows := [row for row in result["rows"] if row.get("profile") != "kernel"]:
        print(tables(rows), flush=True)


def state_of(result: dict[str, Any]) -> str:
    """The state of a part in words."""
    if not result["ok"]:
        return f"FAILED ({result['error']})"
    return "skipped" if result["rows"] and all("skipped" in row for row in result["rows"]) else "ok"


def save(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write everything so far to three files, each replaced at once: a killed run keeps the parts before."""
    parts = report["parts"]
    write_file(args.out / "result.json", json.dumps(report, indent=1).encode())
    texts = [
        f"{name}: {state_of(part)}, {part['seconds']} s\n{tables(part['rows'])}"
        for name, part in parts.items()
    ]
    if together := side_by_side(parts):
        texts.append(f"side by side\n{together}")
    write_file(args.out / "tables.txt", "\n\n".join(texts).encode() + b"\n")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in sorted([*args.work.glob("*.jsonl"), *args.work.glob("*.log")]):
            data = file.read_bytes()[-MOST_LOG:]
            about = tarfile.TarInfo(file.name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    write_file(args.out / "logs.tgz", packed.getvalue())
    for found in args.work.glob("*_blocks.json"):
        write_file(args.out / found.name, found.read_bytes())
