"""Checks kernels on a GPU or a TPU VM, and measures kernels, whole iterations and serving against the chip's limits.

    scripts/gpu_check kernels [--out build/gpu_check] [--parts machine,correct:gpu] [--dry-run]
    scripts/gpu_check steps
    scripts/gpu_check curves
    scripts/gpu_check lease
    scripts/gpu_check lease_engine
    scripts/tpu_check kernels
    scripts/tpu_check steps
    scripts/tpu_check curves

Each command runs from the source tree in at most 9 minutes, and the first three are in the order of their worth;
without one of the names, one command runs these. `lease`, then `lease_engine`, are for a device of 15 minutes. They
need jax, flax, numpy, orbax and safetensors only. The comparison with transformers also needs transformers and torch,
and the part "engine" all packages of orca-jax; they are skipped without them, as are the parts that need
compute-sanitizer or ncu. The limits of the parts fit into the 9 minutes, except for those that run if time is left.
Every part is a process of its own with a time limit: if one fails, hangs or is killed, this is reported and the others
still run. Measurements are written at once, so that a stopped part keeps its earlier ones.

Files in `--out`, all of them written after every part: `result.json`, all results; `tables.txt`, the same for reading;
`logs.tgz`, the rows and the output of each part; `gpu_blocks.json`, the best sizes of blocks. With `--json` the last
line of the output is `result.json` as one line. Results of earlier commands with the same `--out` and device stay, and
whole iterations use another attention if `correct` failed in one of them. The exit status is 1 if a part failed or was
stopped, and 2 if no part could run. `--dry-run` runs everything on a CPU at small sizes, in some minutes on two free
cores.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

# The scripts run any given Python.
if sys.version_info < (3, 12):  # noqa: UP036
    sys.exit(
        f"error: orca-jax needs Python 3.12 or newer; {sys.executable} is older: set PYTHON=path/to/python3.12"
    )

from lab.device_check.part import UTILIZATION, Setting, Write, open_rows
from lab.device_check.runner import (
    GROUPS,
    LEASE_SECONDS,
    LEASES,
    NO_DEVICE,
    PARTS,
    files_of,
    run_parts,
)

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("jax", "flax", "numpy", "orbax", "safetensors")
Measure = Callable[[str, Setting, Write], None]
# of kinds of parts that are not in a module of their own name
_MODULES = {
    "machine": "rates",
    "counters": "tune",
    "step": "steps",
    "serve": "serving",
    "curves": "serving",
}


def main() -> int:
    """Run the parts, or one part in a child process."""
    args = read_arguments()
    if not args.child:
        return run_parts(args)
    try:
        be_part(args)
    except Exception as problem:
        traceback.print_exc()
        print(f"{type(problem).__name__}: {' '.join(str(problem).split())[-400:]}", file=sys.stderr)
        return 1
    return 0


def read_arguments() -> argparse.Namespace:
    """Read and check the flags; `parts` is a list. Ends the process with status 2 if they are wrong."""
    kind = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in PARTS else "gpu"
    parser = argparse.ArgumentParser(
        prog=f"scripts/{kind}_check",
        usage="%(prog)s [kernels | steps | curves | lease | lease_engine] [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=sorted(PARTS), help=argparse.SUPPRESS)
    parser.add_argument(
        "group",
        nargs="?",
        choices=[*GROUPS, *LEASES],
        metavar=" | ".join([*GROUPS, *LEASES]),
        help="default: the first three",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / f"{kind}_check", help="folder for the files"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for rows, logs and compiled programs (default: a new one)"
    )
    parts = PARTS["tpu" if kind == "tpu" else "gpu"]
    names = [part.name for part in parts]
    listed = ", ".join(part.name + " (if time is left)" * part.spare for part in parts)
    parser.add_argument("--parts", metavar="P,P", help=f"parts to run, of: {listed}")
    parser.add_argument(
        "--seconds",
        type=float,
        help="limit for all parts together (default: 540 for each group); more than 1620 lengthens each",
    )
    parser.add_argument(
        "--json", action="store_true", help="print all results as JSON in the last line"
    )
    parser.add_argument("--dry-run", action="store_true", help="run on a CPU, at small sizes")
    parser.add_argument(
        "--attention",
        metavar="NAME",
        help="attention implementation of whole iterations (default: the device's own)",
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help='model to serve: "preset:<name>" or a directory (default: Llama-3-8B, or GPT-2 XL if that does not fit)',
    )
    for hidden in ("--child", "--measure", "--case"):  # of the process of one part
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    groups = [args.group] if args.group else list(GROUPS)
    chosen = [part for part in parts if part.group in groups and part.name != "machine"]
    default = ["machine", *(part.name for part in sorted(chosen, key=lambda part: part.spare))]
    seconds = sum(GROUPS.get(group, 0.0) for group in groups)
    args.limits = {}
    if args.group in LEASES:
        args.limits = LEASES[args.group][kind]
        default = list(args.limits)
        seconds = LEASE_SECONDS[args.group]
    args.parts = args.parts.split(",") if args.parts else default
    args.seconds = args.seconds or seconds
    args.work = args.work or Path(tempfile.mkdtemp(prefix="device_check-"))
    if unknown := [name for name in args.parts if name not in names]:
        parser.error(
            f"--parts: unknown part {', '.join(map(repr, unknown))}; the parts are {', '.join(names)}"
        )
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(
            f"{sys.executable} lacks {', '.join(missing)}; install them, or set PYTHON to an interpreter with them"
        )
    for flag, folder in (("--out", args.out), ("--work", args.work)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            parser.error(f"{flag} {folder}: {problem.strerror}")
    return args


def be_part(args: argparse.Namespace) -> None:
    """Run one part in this process: measure and write."""
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
    if importlib.util.find_spec("jaxtyping") is None:
        from lab.device_check.stand_in import stand_in_for_jaxtyping

        stand_in_for_jaxtyping()
    name, _, what = args.measure.partition(":")
    # an engine starts JAX by itself, after the test of its kernels
    if name not in ("peer", "engine"):
        prepare_jax(args)
    write = open_rows(files_of(args.work, args.child)[0])
    part_of(name)(
        what,
        Setting(args.kind, args.dry_run, args.attention, args.model, args.work, args.case),
        write,
    )


def prepare_jax(args: argparse.Namespace) -> None:
    """Set two CPU devices for a dry run of a TPU VM; otherwise end the process if the device is missing."""
    import jax

    from orca_jax.exec.memory import claim_memory

    claim_memory(UTILIZATION)
    if args.dry_run:
        jax.config.update("jax_num_cpu_devices", 2 if args.kind == "tpu" else 1)
        return
    try:
        platform = jax.default_backend()
    except RuntimeError as problem:
        platform = " ".join(str(problem).split())
    if platform != args.kind:
        plugin = {"gpu": "jax[cuda12] or jax[cuda13]", "tpu": "jax[tpu]"}[args.kind]
        print(
            f"JAX finds no {args.kind.upper()} on this machine (it found: {platform}). Check that {plugin} is "
            f"installed in {sys.executable}, or try --dry-run on a CPU",
            file=sys.stderr,
        )
        sys.exit(NO_DEVICE)


def part_of(name: str) -> Measure:
    """The function of a kind of part, imported here because each needs other packages."""
    module = import_module(f"lab.device_check.{_MODULES.get(name, name)}")
    measure: Measure = getattr(module, name)
    return measure


if __name__ == "__main__":
    sys.exit(main())
