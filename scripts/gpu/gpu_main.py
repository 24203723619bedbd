"""One command on a machine with a GPU: are the kernels right, and how near do they come to the hardware?

    scripts/gpu_check [--out build/gpu_check] [--parts machine,correct:gpu] [--dry-run]

runs from the source tree with jax, flax, numpy, orbax, tokenizers, safetensors and transformers alone; the comparison
with transformers wants torch, and says so where there is none. Every part is a process of its own with a limit on its
time: one that fails, hangs or is killed is reported, and the others go on. Measurements are written as they are made,
so that a part that was stopped keeps what it had.

Files: `<part>.jsonl`, a measurement a line; `<part>.log`, what the part printed; `result.json`, everything. The last
line of the output is that as one line of JSON. `--dry-run` does all of it on a CPU at small sizes.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 465.0  # seconds for all parts


@dataclass(frozen=True)
class Part:
    """A process: what runs, and for how many seconds at most."""

    name: str
    seconds: float


PARTS = (
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
)


def main() -> None:
    """Run the parts, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check", help="folder for the files")
    parser.add_argument("--parts", default=",".join(part.name for part in PARTS), help="which, in this order")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at small sizes")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--attention", help="implementation for whole steps; default: the device's own")
    args = parser.parse_args()
    if args.child:
        be_part(args)
    else:
        run_parts(parser, args)


def run_parts(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """All parts, one after the other, and the report."""
    known = {part.name: part for part in PARTS}
    if unknown := set(args.parts.split(",")) - set(known):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    deadline = time.monotonic() + BUDGET
    for name in args.parts.split(","):
        limit = min(known[name].seconds, deadline - time.monotonic())
        results[name] = run_part(args, name, limit, attention_for_steps(args, results))
        add_shares(results[name]["rows"], results.get("machine"))
        print_part(name, results[name])
    report = {"check": "gpu", "dry_run": args.dry_run, "parts": results}
    (args.out / "result.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report))


def add_shares(rows: list[dict[str, Any]], machine: dict[str, Any] | None) -> None:
    """Rates as shares of what this card was measured to do."""
    reached = {key: value for row in (machine["rows"] if machine else ()) for key, value in row.items()}
    for row in rows:
        for rate, most in (("bytes_per_s", "copy_bytes_per_s"), ("flop_per_s", "matmul_flop_per_s")):
            if rate in row and most in reached:
                row[f"share_of_{most.split('_')[0]}"] = row[rate] / reached[most]


def attention_for_steps(args: argparse.Namespace, results: dict[str, Any]) -> str | None:
    """What whole steps use: Triton's kernels if Mosaic's were seen to fail on this machine."""
    kernels = results.get("correct:gpu")
    if args.attention or args.dry_run or kernels is None or kernels["ok"]:
        return str(args.attention) if args.attention else None
    return "triton"


def run_part(args: argparse.Namespace, name: str, limit: float, attention: str | None) -> dict[str, Any]:
    """One part in a process of its own; whatever happens to it, a result."""
    stem = name.replace(":", "-")
    rows_file, log_file = args.out / f"{stem}.jsonl", args.out / f"{stem}.log"
    rows_file.unlink(missing_ok=True)
    if limit < 5:
        return {"ok": False, "seconds": 0.0, "error": "no time was left", "rows": []}
    command = [sys.executable, str(Path(__file__)), "--child", name, "--out", str(args.out)]
    command += ["--dry-run"] * args.dry_run + (["--attention", attention] if attention else [])
    start, error = time.monotonic(), None
    with log_file.open("wb") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=log, timeout=limit, cwd=ROOT, check=False).returncode
        except subprocess.TimeoutExpired:
            error = f"stopped after {limit:.0f} s"
        else:
            lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            error = None if code == 0 else f"exit {code}: {lines[-1] if lines else 'no output'}"
    rows = rows_file.read_text(encoding="utf-8").splitlines() if rows_file.exists() else []
    found = [json.loads(row) for row in rows]
    failed = [row["error"] for row in found if "error" in row]
    error = error or (failed[0] if failed else None)
    return {"ok": error is None, "seconds": round(time.monotonic() - start, 1), "error": error, "rows": found}


def print_part(name: str, result: dict[str, Any]) -> None:
    """A few lines for people."""
    state = "ok" if result["ok"] else f"FAILED ({result['error']})"
    print(f"\n{name}: {state}, {result['seconds']} s", flush=True)
    for row in result["rows"]:
        print("   " + "  ".join(f"{key}={_short(value)}" for key, value in row.items()), flush=True)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:160]


def be_part(args: argparse.Namespace) -> None:
    """This process is one part: measure and write."""
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    if importlib.util.find_spec("jaxtyping") is None:
        from stand_in import stand_in_for_jaxtyping

        stand_in_for_jaxtyping()
    kind, _, what = args.child.partition(":")
    path = args.out / f"{args.child.replace(':', '-')}.jsonl"
    with path.open("w", encoding="utf-8") as file:

        def write(**row: Any) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        try:
            part_of(kind)(what, args.dry_run, args.attention, write)
        except Exception as problem:
            traceback.print_exc()
            sys.exit(f"{type(problem).__name__}: {' '.join(str(problem).split())[-400:]}")


def part_of(kind: str) -> Callable[[str, bool, str | None, Callable[..., None]], None]:
    """The function of a kind of part: `(what, dry_run, attention, write)`. Imported here: each needs other packages."""
    if kind in ("machine", "correct", "speed"):
        import gpu_kernels

        return {"machine": gpu_kernels.machine, "correct": gpu_kernels.correct, "speed": gpu_kernels.speed}[kind]
    if kind == "peer":
        import gpu_peer

        return gpu_peer.peer
    import gpu_steps

    return {"step": gpu_steps.step, "serve": gpu_steps.serve}[kind]


if __name__ == "__main__":
    main()
