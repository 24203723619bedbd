"""`python -m orca_jax.bench COMMAND [flags]`: benchmarks; `--help` lists them."""

import importlib
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

from orca_jax.checks import check_new_file
from orca_jax.console import lasting_output
from orca_jax.errors import OrcaError, system_message
from orca_jax.flags import FlagParser, program, run_program

OUTPUTS = ("page", "plot", "save", "write_trace")  # flags with a file for the results, written at the end


class Benchmark(NamedTuple):
    """A command: its module below this package, with `run`, and its line in the help.

    The function `add_args` is in the module too, or in `flags`, if the module imports much.
    """

    module: str
    help: str
    flags: str | None = None
    folders: Collection[str] = ()  # flags of `OUTPUTS` with a directory


COMMANDS = {
    "batch": Benchmark("batch", "overhead of a batch file over the same requests sent to the engine directly"),
    "batch_memory": Benchmark("batch_memory", "peak memory of batch runs of different lengths"),
    "burst": Benchmark("burst", "one burst of mixed lengths, request-level and by another scheduler"),
    "control": Benchmark("hosts.control", "time to send plans to workers"),
    "foresight": Benchmark("length_prediction", "latency with each length predictor, on word problems"),
    "held_out": Benchmark("simulated.held_out", "record runs, and predict held-out ones by a fitted simulator"),
    "host": Benchmark("host_time", "host time and device idle time per iteration"),
    "load": Benchmark("loading.command", "time and memory of loading weights, against a plain read"),
    "lora": Benchmark("lora.command", "cost of adapters in one batch", "lora.flags"),
    "offline": Benchmark("offline", "throughput and latency of a workload in this process"),
    "online": Benchmark("online.command", "streaming clients against any server: arrivals at a rate or from a trace"),
    "paper": Benchmark("paper.command", "names the place of the simulated evaluation: python -m lab reproduce"),
    "paper_real": Benchmark("real.command", "the paper's Figures 9, 10 and 11 on a real engine"),
    "peers": Benchmark("peers.command", "throughput and latency beside other engines on the same requests"),
    "predict": Benchmark("simulated.predict", "predict a recorded run from another one, and print the errors"),
    "prefix": Benchmark("prefix_reuse", "hit rate, gain and cost of prefix caching"),
    "products": Benchmark(
        "quantisation.products",
        "products of a few tokens with plain and quantised matrices",
        "quantisation.products_flags",
    ),
    "quantised": Benchmark(
        "quantisation.quantised",
        "quality, speed and memory of quantised weights and KV caches",
        "quantisation.quantised_flags",
    ),
    "replay": Benchmark("replay", "run recorded arrivals under another scheduler, on a virtual clock"),
    "schedulers": Benchmark("schedulers", "compare schedulers over a sweep of arrival rates"),
    "speculation": Benchmark(
        "speculation.command", "speculation against none: tokens per second and accepted proposals"
    ),
    "start": Benchmark("start", "time from the command of a server to its first token, cold and warm"),
    "tracing": Benchmark("timeline_cost", "cost of --trace-file"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Return the exit code: 1 if its report was lost, 2 if a flag is wrong."""
    with lasting_output() as output:
        status = _main(argv)
    return 1 if output.is_lost and status == 0 else status


def make_parser(names: Collection[str] = tuple(COMMANDS)) -> FlagParser:
    """Return the parser of all commands, with the flags of those in `names`; only their modules are imported."""
    parser = FlagParser(prog=program("bench"), description="Measure the engine and the server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, benchmark in COMMANDS.items():
        if name not in names:
            commands.add_parser(name, help=benchmark.help)
            continue
        flags = importlib.import_module(f"orca_jax.bench.{benchmark.flags or benchmark.module}")
        description = benchmark.help.capitalize() if benchmark.flags else flags.__doc__
        command = commands.add_parser(name, help=benchmark.help, description=description)
        flags.add_args(command)
        command.set_defaults(run=partial(_run, benchmark.module), folders=benchmark.folders)
    return parser


def _run(module: str, args: Namespace) -> None:
    importlib.import_module(f"orca_jax.bench.{module}").run(args)


def _main(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        args = make_parser(words[:1]).parse_args(argv)
        for name in OUTPUTS:
            if name not in args.folders and (path := getattr(args, name, None)) is not None:
                check_new_file(path, name)
        args.run(args)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a directory for temporary files that cannot be written, for example
        print(f"error: {system_message(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(run_program("bench", main))
