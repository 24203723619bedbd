"""Compare with another engine on the CPU: both run the same workload in alternation, on the same weights.

Each side is a process with a loaded model; each round runs a pass of both, and they take turns in being first. The
result is the median of the rounds' ratios. The other engine's environment is made in --environment if the folder does
not exist; this needs the network and a Python that its packages support. Flags after `--` are passed to our engine.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orca_jax.bench.peers.environment import intel_openmp, prepare_environment, program_of
from orca_jax.bench.peers.inputs import WORKLOAD_FILE, model_for_peers, write_workload
from orca_jax.bench.peers.registry import PEERS
from orca_jax.bench.peers.side import Side
from orca_jax.bench.workload.generate import add_workload_args, workload_from_args, workload_settings
from orca_jax.errors import ConfigError
from orca_jax.flags import human_int
from orca_jax.model.describe import read_model_config
from orca_jax.processor import cpu_flags, cpu_name
from orca_jax.reporting import print_table

HELP = "throughput beside another engine's on the same workload, in alternation"
RATE = "output_tokens_per_s"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    add_workload_args(parser)
    parser.add_argument("--peer", choices=PEERS, default="vllm", help="the other engine (default: vllm)")
    parser.add_argument("--environment", metavar="DIR", help="its environment, made if DIR does not exist")
    parser.add_argument("--modes", nargs="+", metavar="NAME", help="its ways of running (default: all that it has)")
    parser.add_argument(
        "--model", default="preset:gpt2", metavar="MODEL", help="directory or preset (default: preset:gpt2)"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"], help="types (default: float32)"
    )
    parser.add_argument(
        "--threads", type=int, nargs="+", metavar="N", help="numbers of processors (default: 1, and all processors)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="passes of each side (default: 3)")
    parser.add_argument(
        "--max-num-seqs", type=human_int, default=64, metavar="N", help="requests in our batch (default: 64)"
    )
    parser.add_argument("--peer-max-num-seqs", type=human_int, metavar="N", help="in the peer's (default: by the peer)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of workload and weights (default: 0)")
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="longest start or pass (default: 1800)"
    )
    parser.add_argument("--write", metavar="DIR", help="only write the inputs of the programs: workload and model")
    parser.add_argument("engine_flags", nargs="*", metavar="-- FLAG", help="further flags of our engine")


@dataclass(frozen=True)
class Inputs:
    """The files of a comparison."""

    workload: Path
    model: Path


@dataclass(frozen=True)
class Pairs:
    """The passes of one setting, in output tokens per second, round by round."""

    own: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours to the peer's, round by round."""
        return [own / peer for own, peer in zip(self.own, self.peer, strict=True)]

    def figures(self) -> dict[str, Any]:
        """Return medians and the range of the ratios, with all passes."""
        ratios = self.ratios
        return {
            "own_tokens_per_s": statistics.median(self.own),
            "peer_tokens_per_s": statistics.median(self.peer),
            "ratio": statistics.median(ratios),
            "ratio_least": min(ratios),
            "ratio_most": max(ratios),
            "own_passes": self.own,
            "peer_passes": self.peer,
        }


def run(args: argparse.Namespace) -> None:
    """Run all pairs; print a table and a line of JSON.

    Raises:
        ConfigError: a flag is wrong.
        OrcaError: the environment cannot be made, or a side ended.
    """
    if args.write is not None:
        Path(args.write).mkdir(parents=True, exist_ok=True)
        found = _write_inputs(args, Path(args.write))
        print(json.dumps({"workload": str(found.workload), "model": str(found.model)}))
        return
    threads = _check(args)
    program, environment = program_of(PEERS[args.peer]), Path(args.environment)
    python = prepare_environment(PEERS[args.peer], environment)
    with tempfile.TemporaryDirectory() as folder:
        inputs = _write_inputs(args, Path(folder))
        settings: dict[str, Any] = {}
        about: dict[str, Any] = {}
        for dtype in args.dtype:
            for number in threads:
                with _ours(args, inputs, dtype, number) as own:
                    about["own"] = own.about()
                    for mode in args.modes:
                        command = _peer_command(args, inputs, python, program, dtype, number, mode)
                        with Side(f"{args.peer} ({mode})", command, args.timeout) as peer:
                            about["peer"] = peer.about()
                            pairs = alternate(own, peer, args.rounds)
                        settings[f"{args.peer}/{dtype}/{mode}/{number}"] = pairs.figures()
                        print(f"{args.peer} {dtype} {mode}, {number} threads: {pairs.ratios}", file=sys.stderr)
    _report(args, settings, about)


def alternate(own: Side, peer: Side, rounds: int) -> Pairs:
    """Run the passes of both sides, each first in every other round."""
    pairs = Pairs([], [])
    for number in range(rounds):
        order = [(own, pairs.own), (peer, pairs.peer)]
        for side, passes in order if number % 2 == 0 else reversed(order):
            passes.append(side.run_pass()[RATE])
    return pairs


def _check(args: argparse.Namespace) -> list[int]:
    """Refuse wrong flags, and set the default modes. Returns the numbers of processors."""
    peer = PEERS[args.peer]
    if args.environment is None:
        message = "environment is missing; give a folder for the peer's environment, which is made if it does not exist"
        raise ConfigError(message, param="environment")
    if args.rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {args.rounds}", param="rounds")
    args.modes = args.modes or list(peer.modes)
    for mode in args.modes:
        if mode not in peer.modes:
            raise ConfigError(f"modes of {args.peer} are {', '.join(peer.modes)}, got {mode!r}", param="modes")
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = args.threads or sorted({1, available})
    if not all(1 <= number <= available for number in threads):
        message = f"threads must be from 1 to {available}, the available processors, got {threads}"
        raise ConfigError(message, param="threads")
    return list(threads)


def _write_inputs(args: argparse.Namespace, folder: Path) -> Inputs:
    model = read_model_config(args.model)
    workload = workload_from_args(args, vocab_size=model.vocab_size, max_model_len=model.max_positions, rate=None)
    path = folder / WORKLOAD_FILE
    write_workload(path, workload, {**workload_settings(args), "model": args.model, "seed": args.seed})
    return Inputs(path.absolute(), model_for_peers(args.model, args.seed, folder / "model"))


@contextlib.contextmanager
def _ours(args: argparse.Namespace, inputs: Inputs, dtype: str, threads: int) -> Iterator[Side]:
    with Side("orca-jax", own_command(args, inputs, dtype, threads), args.timeout) as side:
        yield side


def own_command(args: argparse.Namespace, inputs: Inputs, dtype: str, threads: int) -> list[str]:
    """Return the command of our side."""
    return [
        *(sys.executable, "-m", "orca_jax.bench.peers.own", "--workload", str(inputs.workload)),
        *("--model", str(inputs.model), "--tokenizer", "byte", "--dtype", dtype, "--threads", str(threads)),
        *("--max-num-seqs", str(args.max_num_seqs), "--seed", str(args.seed), *args.engine_flags),
    ]


def _peer_command(
    args: argparse.Namespace, inputs: Inputs, python: Path, program: Path, dtype: str, threads: int, mode: str
) -> list[str]:
    """Return the command of the peer; variables that libraries read before the program runs come from `env`."""
    peer = PEERS[args.peer]
    library = intel_openmp(Path(args.environment)) if peer.uses_intel_openmp else None
    variables = [f"OMP_NUM_THREADS={threads}", *([f"LD_PRELOAD={library}"] if library else [])]
    return [
        *("env", *variables, str(python), str(program), "--on-request", "--workload", str(inputs.workload)),
        *("--model", str(inputs.model), "--mode", mode, "--dtype", dtype, "--threads", str(threads)),
        *("--max-num-seqs", str(args.peer_max_num_seqs or peer.max_num_seqs)),
    ]


def _report(args: argparse.Namespace, settings: dict[str, Any], about: dict[str, Any]) -> None:
    rows = {
        name: f"{one['own_tokens_per_s']:.1f} to {one['peer_tokens_per_s']:.1f} tokens/s, "
        f"ratio {one['ratio']:.2f} ({one['ratio_least']:.2f} to {one['ratio_most']:.2f})"
        for name, one in settings.items()
    }
    print_table(f"ours to {args.peer}'s, {args.model}, medians of {args.rounds} rounds", rows)
    machine = {"cpu": cpu_name(), "cpu_flags": cpu_flags(), "cores": os.cpu_count()}
    versions: Sequence[tuple[str, Any]] = [*about["peer"]["versions"].items(), *about["own"]["hardware"].items()]
    print_table("machine and versions", {**dict(versions), **machine})
    config = {name: value for name, value in vars(args).items() if name not in ("run", "command")}
    ratios = {name: one["ratio"] for name, one in settings.items()}
    print(json.dumps({"ratios": ratios, "settings": settings, "hardware": machine, "sides": about, "config": config}))
