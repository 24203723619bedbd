"""`python -m orca_jax bench COMMAND [flags]`: benchmarks; `--help` lists them."""

import sys
from collections.abc import Collection, Sequence

from orca_jax.flags import EXIT_USAGE, FlagParser, program, run_program
from orca_jax.tools.bench.commands import Command, command_parser, run_command

COMMANDS = {
    "burst": Command(
        "orca_jax.tools.bench.burst",
        "one burst of mixed lengths, request-level and by another scheduler",
    ),
    "offline": Command(
        "orca_jax.tools.bench.offline", "throughput and latency of a workload in this process"
    ),
    "online": Command(
        "orca_jax.tools.bench.online.command",
        "streaming clients against any server: arrivals at a rate or from a trace",
    ),
    "replay": Command(
        "orca_jax.tools.bench.replay",
        "run recorded arrivals under another scheduler, on a virtual clock",
    ),
    "schedulers": Command(
        "orca_jax.tools.bench.schedulers", "compare schedulers over a sweep of arrival rates"
    ),
    "start": Command(
        "orca_jax.tools.bench.start",
        "time from the command of a server to its first token, cold and warm",
    ),
}
_SAME_NAME = (
    "batch", "batch_memory", "foresight", "held_out", "host", "lora", "paper_real", "peers", "predict", "prefix",
    "products", "quantised", "speculation",
)  # fmt: skip
_FLAGS = {"--host-time": "scheduler_cost", "--install": "install", "--profile": "parts"}
MOVED = (
    {name: name for name in _SAME_NAME}
    | {"control": "plan_messages", "paper": "reproduce"}
    | _FLAGS
)
"""Earlier commands and flags of this program, by the commands of `python -m lab` in their place."""
GONE = ("load", "tracing")
"""Earlier commands with a result in docs/benchmarks.md, which nothing depends on any more."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Return the exit code: 1 if its report was lost, 2 if a flag is wrong."""
    words = sys.argv[1:] if argv is None else argv
    if (remark := _moved(words)) is not None:
        print(f"error: bench {remark}", file=sys.stderr)
        return EXIT_USAGE
    return run_command(make_parser, words)


def _moved(words: Sequence[str]) -> str | None:
    """Return the place of an earlier command or flag."""
    # the flags of a server are after it
    own = words[: words.index("--")] if "--" in words else words
    if own and own[0] in GONE:
        return f"{own[0]} has ended; its result is in docs/benchmarks.md"
    for name in [word.partition("=")[0] for word in own if word == own[0] or word.startswith("--")]:
        if name in MOVED:
            return (
                f"{name} has moved; run `python -m lab {MOVED[name]}`, in a clone of the repository"
            )
    return None


def make_parser(names: Collection[str] = tuple(COMMANDS)) -> FlagParser:
    """Return the parser of all commands, with the flags of those in `names`; only their modules are imported."""
    return command_parser(
        FlagParser(program("bench"), description="Measure the engine and the server."),
        COMMANDS,
        names,
    )


if __name__ == "__main__":
    sys.exit(run_program("bench", main))
