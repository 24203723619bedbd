"""Runs schedulers on loads in virtual time, in several processes, and reports."""

import argparse
import csv
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from io import StringIO
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple

from orca_jax.bench.virtual import SimulatedRequest
from orca_jax.bench.workload.generate import make_workload, workload_settings
from orca_jax.checks import is_class_name
from orca_jax.errors import ConfigError
from orca_jax.reporting import write_file
from orca_jax.sim.cost import LinearCost
from orca_jax.simulate.__main__ import SETTINGS
from orca_jax.simulate.run import SimulatedRecord, SimulatedRun, simulate
from orca_jax.simulate.why import why
from orca_jax.timeline.fit import fit_cost
from orca_jax.timeline.read import load_timeline

OF_POLICIES = ("scheduler_options", "max_num_rows")
"""Settings without effect on schedulers of the package; in a sweep these are run without them."""
COLUMNS = {
    "requests_per_s": "requests/s", "median_ttft_ms": "median TTFT", "p99_ttft_ms": "p99 TTFT",
    "p99_inter_token_ms": "p99 gap", "median_normalized_latency_ms": "ms/token", "preemptions": "preemptions",
}  # fmt: skip
VOCABULARY = 50_000


class _SweepRun(NamedTuple):
    """One run of a sweep."""

    policy: str
    rate: float | None
    seed: int
    args: argparse.Namespace

    def simulated(self) -> SimulatedRun:
        """Return the result of the run."""
        shape: dict[str, Any] = {name: getattr(self.args, name) for name in ("num_requests", "length_scale")}
        workload = make_workload(
            self.args.trace, vocab_size=VOCABULARY, seed=self.seed, rate=self.rate, data=self.args.trace_data, **shape
        )
        load = [SimulatedRequest(each.arrival, each.prompt_ids, each.num_output) for each in workload]
        names = [name for name in SETTINGS if is_class_name(self.policy) or name not in OF_POLICIES]
        settings = {name: getattr(self.args, name) for name in names if hasattr(self.args, name)}
        return simulate(self.policy, load, _cost(self.args.cost), **settings)

    def figures(self) -> tuple[dict[str, Any], list[SimulatedRecord]]:
        """The figures with the names of the run, and the requests."""
        found = self.simulated()
        policy = found.timeline.head.config.scheduler
        return {"policy": policy, "rate": self.rate, "seed": self.seed, **found.figures}, found.records


def run(args: argparse.Namespace) -> int:
    """Run all simulations; print a table and a line of JSON. Return the exit status.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    runs = [_SweepRun(*each, args) for each in product(args.policies, args.rate or [None], args.seed)]
    for name in ("timeline", "why"):
        if getattr(args, name) is not None and len(runs) > 1:
            raise ConfigError(f"{name} is for one run; give one policy, one rate and one seed", param=name)
    if args.why is not None:
        number, _, iteration = args.why.partition("@")
        if not (number.isdecimal() and iteration.isdecimal()):
            raise ConfigError(f"why must be REQUEST@ITERATION, such as 17@940, got {args.why!r}", param="why")
        print(why(runs[0].simulated(), int(number), int(iteration)))
        return 0
    if args.timeline is not None:
        write_file(args.timeline, runs[0].simulated().data)
    if len(runs) == 1 or args.jobs == 1:
        results = [each.figures() for each in runs]
    else:
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as processes:
            results = list(processes.map(_SweepRun.figures, runs))
    if args.csv is not None:
        write_file(args.csv, _csv(results).encode())
    _print([figures for figures, _ in results])
    print(json.dumps({"runs": [figures for figures, _ in results], "cost": args.cost, **workload_settings(args)}))
    return 0


def _cost(text: str) -> LinearCost:
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return fit_cost(load_timeline(text)).cost
    if len(parts) > 3 or min(numbers) < 0 or not sum(numbers):
        raise ConfigError(f"cost must be one to three seconds above 0, such as 0.02,0.0001, got {text}", param="cost")
    per_iteration, per_token, per_pair = [*numbers, 0.0, 0.0][:3]
    return LinearCost(per_iteration, per_token, per_pair)


def _csv(results: Sequence[tuple[dict[str, Any], list[SimulatedRecord]]]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("policy", "rate", "seed", *SimulatedRecord._fields))
    for figures, records in results:
        writer.writerows([(figures["policy"], figures["rate"], figures["seed"], *record) for record in records])
    return text.getvalue()


def _print(runs: Sequence[dict[str, Any]]) -> None:
    policies = [each["policy"].partition(" (sha256:")[0] for each in runs]
    names = [
        f"{name}, {each['rate'] or 'at once'}, seed {each['seed']}" for name, each in zip(policies, runs, strict=True)
    ]
    width = max(map(len, names))
    print(f"{'':<{width}}  " + "  ".join(COLUMNS.values()))
    for name, figures in zip(names, runs, strict=True):
        cells = [f"{figures[column]:>{len(title)},.4g}" for column, title in COLUMNS.items()]
        print(f"{name:<{width}}  " + "  ".join(cells))
