"""One command on a machine with a GPU or on a TPU VM: are the kernels right, and how near do they come to the chip?

    scripts/gpu_check [--out build/gpu_check] [--parts machine,correct:gpu] [--dry-run]
    scripts/tpu_check [--out build/tpu_check] [--parts machine,correct:tpu] [--dry-run]

run from the source tree in under 8 minutes, with jax, flax, numpy, orbax and safetensors alone; the comparison with
transformers wants that and torch, and says so where they are not. Every part is a process of its own with a limit on
its time: one that fails, hangs or is killed is reported, and the others go on. Measurements are written as they are
made, so that a part that was stopped keeps what it had.

Files: `<part>.jsonl`, a measurement a line; `<part>.log`, what the part printed; `result.json`, everything. The last
line of the output is that as one line of JSON. The exit status is 1 where something is wrong or was stopped, and 2
where nothing could be done. `--dry-run` does all of it on a CPU at small sizes, in two minutes on two free cores.
"""

import argparse
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

# The scripts take any Python that they are given.
if sys.version_info < (3, 12):  # noqa: UP036
    sys.exit(f"error: orca-jax needs Python 3.12 or newer; {sys.executable} is older: set PYTHON=path/to/python3.12")

from device_check.part import Setting, Write, open_rows
from device_check.runner import NO_DEVICE, PARTS, run_parts

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("jax", "flax", "numpy", "orbax", "safetensors")
Measure = Callable[[str, Setting, Write], None]


def main() -> int:
    """Run the parts, or be one of them."""
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
    """Flags, checked; `parts` is a list. Ends the process with status 2 where they are wrong."""
    kind = sys.argv[1] if sys.argv[1:2] and sys.argv[1] in PARTS else "gpu"
    parser = argparse.ArgumentParser(
        prog=f"scripts/{kind}_check",
        usage="%(prog)s [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=sorted(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / f"{kind}_check", help="folder for the files")
    names = [part.name for part in PARTS["tpu" if kind == "tpu" else "gpu"]]
    parser.add_argument(
        "--parts", default=",".join(names), metavar="P,P", help=f"which, in this order: {', '.join(names)}"
    )
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, at small sizes")
    parser.add_argument(
        "--attention", metavar="NAME", help="implementation for whole steps (default: the device's own)"
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help='served: "preset:<name>" or a directory (default: Llama-3-8B, or GPT-2 XL if it fits)',
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := [name for name in args.parts if name not in names]:
        parser.error(f"there is no part {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        parser.error(f"{sys.executable} has no {', '.join(missing)}; install them, or set PYTHON to one that has")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        parser.error(f"--out {args.out}: {problem.strerror}")
    return args


def be_part(args: argparse.Namespace) -> None:
    """This process is one part: measure and write."""
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is imported
    if importlib.util.find_spec("jaxtyping") is None:
        from device_check.stand_in import stand_in_for_jaxtyping

        stand_in_for_jaxtyping()
    name, _, what = args.child.partition(":")
    if name != "peer":
        prepare_jax(args)
    write = open_rows(args.out / f"{args.child.replace(':', '-')}.jsonl")
    part_of(name)(what, Setting(args.kind, args.dry_run, args.attention, args.model), write)


def prepare_jax(args: argparse.Namespace) -> None:
    """Two devices for a dry run of a TPU VM; else the device must be there, or the process ends."""
    import jax

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
            f"there is no {args.kind.upper()} here that JAX sees (it has: {platform}). Is {plugin} installed in "
            f"{sys.executable}? --dry-run shows what would be done",
            file=sys.stderr,
        )
        sys.exit(NO_DEVICE)


def part_of(name: str) -> Measure:
    """What does a kind of part. Imported here: each needs other packages."""
    if name == "machine":
        from device_check.rates import machine as measure
    elif name == "correct":
        from device_check.correct import correct as measure
    elif name == "speed":
        from device_check.speed import speed as measure
    elif name == "step":
        from device_check.steps import step as measure
    elif name == "serve":
        from device_check.serving import serve as measure
    else:
        from device_check.peer import peer as measure
    return measure


if __name__ == "__main__":
    sys.exit(main())
