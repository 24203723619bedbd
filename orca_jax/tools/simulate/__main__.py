"""`orca-jax simulate POLICY ... --rate X ...`: serve requests under schedulers, or your own policies, in virtual time.

A policy is the name of a scheduler, or FILE.py:CLASS: a scheduler, or an order or a retention of `chunked`.
"""

import os
import sys
from collections.abc import Collection, Sequence
from functools import partial

from orca_jax.flags import FlagParser, add_number, add_setting_args, program, run_program
from orca_jax.tools.bench.commands import run_command, run_module
from orca_jax.tools.bench.workload.generate import add_workload_args
from orca_jax.tools.bench.workload.urgency import add_urgency_args

SETTINGS = (
    "scheduler_options", "scheduling_policy", "length_predictor", "retention", "max_num_seqs", "max_num_batched_tokens",
    "max_num_rows", "page_size", "num_pages", "overlap", "enable_prefix_caching", "n_slots",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulations. Return the exit code: 1 if the report was lost, 2 if a flag or a policy is wrong."""
    return run_command(make_parser, argv)


def make_parser(_: Collection[str] = ()) -> FlagParser:
    """Return the parser of the command line."""
    name = program("simulate")
    made = FlagParser(prog=name, usage=f"{name} POLICY ... [flags]", description=__doc__)
    made.add_argument(
        "policies", nargs="*", metavar="POLICY", help="name of a scheduler, or FILE.py:CLASS"
    )
    made.add_argument(
        "--cost", metavar="SECONDS",
        help="of an iteration, each of its tokens, and each pair of tokens in attention: X, X,X or X,X,X; a timeline "
        "of --trace-file, to fit them to; profile:PREFIX,layers=N for measured operators of a layer; "
        "tables:DIR,card=C,source=S,model=M for measured kernels of a card (default: fitted to --recorded, else "
        "0.02,0.0001)",
    )  # fmt: skip
    made.add_argument(
        "--rate", type=float, nargs="+", metavar="X",
        help="requests per second; inf: all at once (default: the times of --trace-data, else all at once)",
    )  # fmt: skip
    add_number(made, "--seed", [0], "seeds of loads", nargs="+")
    made.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="processes (default: all cores)",
    )
    made.add_argument("--csv", metavar="FILE", help="write a line for each request")
    made.add_argument(
        "--timeline",
        metavar="FILE",
        help="write the timeline of one run",
    )
    made.add_argument(
        "--why",
        metavar="REQUEST@ITERATION",
        help="say why a request of one run is not in an iteration, as in 17@940",
    )
    made.add_argument(
        "--recorded", metavar="FILE",
        help="requests to run again, recorded by vLLM, guidellm, inference-perf, OpenTelemetry, Mooncake, Azure, or as "
        "a timeline",
    )  # fmt: skip
    made.add_argument(
        "--policies", dest="chosen", nargs="+", metavar="POLICY",
        help="policies of --recorded (default: all, in a clone with the shelf)",
    )  # fmt: skip
    made.add_argument("--out", metavar="PAGE", help="page of --recorded, as HTML")
    add_workload_args(made)
    add_urgency_args(made)
    add_setting_args(made, SETTINGS)
    made.set_defaults(run=partial(run_module, "orca_jax.tools.simulate.sweep"), folders=())
    return made


if __name__ == "__main__":
    sys.exit(run_program("simulate", main))
