"""`python -m orca_jax.bench COMMAND [flags]`: benchmarks; `--help` lists them."""

import sys

from orca_jax.bench import (
    batch,
    batch_memory,
    burst,
    host_time,
    length_prediction,
    offline,
    prefix_reuse,
    replay,
    schedulers,
    start,
    timeline_cost,
)
from orca_jax.bench.hosts import control
from orca_jax.bench.loading import command as load
from orca_jax.bench.online import command as online
from orca_jax.bench.paper import command as paper
from orca_jax.bench.peers import command as peers
from orca_jax.bench.quantisation import products, quantised
from orca_jax.bench.real import command as real
from orca_jax.bench.simulated import held_out, predict
from orca_jax.console import lasting_output
from orca_jax.errors import OrcaError, system_message
from orca_jax.flags import FlagParser, program

COMMANDS = {
    "batch": batch,
    "batch_memory": batch_memory,
    "burst": burst,
    "control": control,
    "foresight": length_prediction,
    "host": host_time,
    "held_out": held_out,
    "load": load,
    "offline": offline,
    "online": online,
    "paper": paper,
    "paper_real": real,
    "peers": peers,
    "predict": predict,
    "prefix": prefix_reuse,
    "products": products,
    "quantised": quantised,
    "replay": replay,
    "schedulers": schedulers,
    "start": start,
    "tracing": timeline_cost,
}


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark. Return the exit code: 1 if its report was lost, 2 if a flag is wrong."""
    with lasting_output() as output:
        status = _main(argv)
    return 1 if output.is_lost and status == 0 else status


def make_parser() -> FlagParser:
    """Return the parser of all commands."""
    parser = FlagParser(prog=program("bench"), description="Measure the engine and the server.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_args(command)
        command.set_defaults(run=module.run)
    return parser


def _main(argv: list[str] | None) -> int:
    args = make_parser().parse_args(argv)
    try:
        args.run(args)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a directory for temporary files that cannot be written, for example
        print(f"error: {system_message(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
