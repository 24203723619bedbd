"""`orca-jax check-policy FILE.py:CLASS`: test a scheduler, an order or a retention of your own on small random cases.

All requests must end with their tokens and give their pages back, no decision may be refused or overruled, and unless
the class has `may_starve`, no request may wait for more than its `longest_wait` iterations (256) while newer ones run.
A retention is asked about turns of a few talks in a small cache; it may raise nothing, and must return numbers.
The class runs in a process of its own: it may end it or wait for ever, and both are faults.
The last line names the first fault with its smallest case, or says that there is none.
"""

import argparse
import logging
import random
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from orca_jax.flags import FlagParser, add_number, help_of, program, run_program
from orca_jax.tools.bench.commands import run_command
from orca_jax.tools.simulate import NUM_CASES
from orca_jax.tools.simulate.guarded import MODEL_SECONDS, Begin, checked
from orca_jax.values.checks import require
from orca_jax.values.config import LRU
from orca_jax.values.request import SamplingParams

if TYPE_CHECKING:
    from orca_jax.engine import Engine

MOST_CASES = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    """Check a policy. Return the exit code: 1 if it has a fault or the report was lost, 2 if a flag is wrong."""
    return run_command(make_parser, argv)


def make_parser(_: Collection[str] = ()) -> FlagParser:
    """Return the parser of the command line."""
    made = FlagParser(prog=program("check-policy"), description=__doc__)
    made.add_argument(
        "policy", metavar="FILE.py:CLASS", help="class of the scheduler, the order or the retention"
    )
    made.add_argument("--scheduler-options", metavar="JSON", help=help_of("scheduler_options"))
    made.add_argument(
        "--model", metavar="MODEL", help="compare the tokens of this model too, in float32"
    )
    add_number(made, "--cases", NUM_CASES, "cases")
    add_number(made, "--seed", 0, "seed of the cases")
    made.set_defaults(run=run, folders=())
    return made


def run(args: argparse.Namespace) -> int:
    """Check a policy, and print one line. Return 1 if it has a fault.

    Raises:
        ConfigError: the class or a setting is wrong.
    """
    require(
        1 <= args.cases <= MOST_CASES,
        "cases",
        f"cases must be from 1 to {MOST_CASES}, got {args.cases}",
    )
    words = (args.policy, args.scheduler_options, args.model, args.seed, args.cases)
    fault = checked(partial(fault_of_policy, *words))
    name = args.policy.rpartition(":")[2]
    print(f"{name}: {fault}" if fault else f"{name}: no fault in {args.cases} cases")
    if fault:
        return 1
    return 0


def fault_of_policy(
    policy: str, options: str | None, model: str | None, seed: int, num_cases: int, begin: Begin
) -> str:
    """Return the first fault of a policy, on the toy and then on a model, in words; "" if there is none.

    Raises:
        ConfigError: the class or a setting is wrong.
    """
    from orca_jax.tools.simulate.check import find_fault  # help comes without it

    for name in ("orca_jax.policy", "orca_jax.sched.prefixes"):  # faults are in the report
        logging.getLogger(name).setLevel(logging.CRITICAL)
    fault = find_fault(policy, options, seed, num_cases, begin)
    if fault or model is None:
        return fault
    begin(f"the comparison on {model}", MODEL_SECONDS)
    return fault_on_model(policy, options, model, seed)


def fault_on_model(policy: str, options: str | None, model: str, seed: int) -> str:
    """Return a prompt with other tokens under the policy than under `chunked`, in words; "" if there is none."""
    from orca_jax.assembly.engine import build_engine  # JAX
    from orca_jax.tools.bench.measure import reschedule
    from orca_jax.tools.simulate.check import checked_config

    rng = random.Random(seed)
    sizes = [(rng.randint(1, 48), rng.randint(1, 24)) for _ in range(16)]

    def answers(engine: "Engine") -> list[list[int]]:
        found: list[list[int]] = [[] for _ in sizes]
        for index, (num_prompt, num_output) in enumerate(sizes):
            ids = [(31 * index + place) % 200 for place in range(num_prompt)]
            engine.add_request(
                f"{index}", ids, SamplingParams(num_output, temperature=0.0, ignore_eos=True)
            )
        while engine.has_work:
            for update in engine.step():
                found[int(update.request_id)].extend(update.new_ids)
        return found

    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "page_size": 8,
        "num_pages": 24,
        "max_num_rows": 6,
    }
    config = replace(
        checked_config(policy, options, settings), model=model, dtype="float32", max_model_len=128
    )
    plain = replace(
        config,
        scheduler="chunked",
        scheduling_policy="fcfs",
        retention=LRU,
        max_num_rows=None,
        scheduler_options=None,
    )
    with build_engine(config) as built:
        tried = answers(built.engine)
        reschedule(built, plain)
        for index, (one, other) in enumerate(zip(tried, answers(built.engine), strict=True)):
            if one != other:
                return f"on {model}, a request of {sizes[index][0]}+{sizes[index][1]} tokens has other tokens"
    return ""


if __name__ == "__main__":
    sys.exit(run_program("check-policy", main))
