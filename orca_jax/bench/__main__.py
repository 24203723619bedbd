"""`python -m orca_jax.bench {batch,batch_memory,foresight,host,offline,online,prefix,schedulers,tracing} [flags]`."""

import argparse
import sys

from orca_jax.bench import batch, batch_memory, foresight, host, offline, online, prefix, schedulers, tracing
from orca_jax.errors import OrcaError


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; 2 where a flag is wrong."""
    parser = argparse.ArgumentParser(prog="python -m orca_jax.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (batch, batch_memory, foresight, host, offline, online, prefix, schedulers, tracing):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_args(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
