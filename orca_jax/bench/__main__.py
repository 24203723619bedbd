"""`python -m orca_jax.bench COMMAND [flags]`: benchmarks; `--help` lists them."""

import sys
from collections.abc import Collection, Sequence

from orca_jax.bench.commands import Command, command_parser, run_command
from orca_jax.flags import EXIT_USAGE, FlagParser, program, run_program

COMMANDS = {
    "burst": Command("orca_jax.bench.burst", "one burst of mixed lengths, request-level and by another scheduler"),
    "offline": Command("orca_jax.bench.offline", "throughput and latency of a workload in this process"),
    "online": Command(
        "orca_jax.bench.online.command", "streaming clients against any server: arrivals at a rate or from a trace"
    ),
    "replay": Command("orca_jax.bench.replay", "run recorded arrivals under another scheduler, on a virtual clock"),
    "schedulers": Command("orca_jax.bench.schedulers", "compare schedulers over a sweep of arrival rates"),
    "start": Command("orca_jax.bench.start", "time from the command of a server to its first token, cold and warm"),
}
_SAME_NAME = (
    "batch", "batch_memory", "foresight", "held_out", "host", "load", "lora", "paper_real", "peers", "predict",
    "prefix", "products", "quantised", "speculation", "tracing",
)  # fmt: skip
MOVED = {name: name for name in _SAME_NAME} | {"control": "plan_messages", "paper": "reproduce"}
"""Earlier commands of this program, by their names among the commands of `python -m lab`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Return the exit code: 1 if its report was lost, 2 if a flag is wrong."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in MOVED:
        place = f"`python -m lab {MOVED[words[0]]}`, in a clone of the repository"
        print(f"error: bench {words[0]} has moved; run {place}", file=sys.stderr)
        return EXIT_USAGE
    return run_command(make_parser, words)


def make_parser(names: Collection[str] = tuple(COMMANDS)) -> FlagParser:
    """Return the parser of all commands, with the flags of those in `names`; only their modules are imported."""
    return command_parser(
        FlagParser(program("bench"), description="Measure the engine and the server."), COMMANDS, names
    )


if __name__ == "__main__":
    sys.exit(run_program("bench", main))
