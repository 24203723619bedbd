"""Runs schedulers on loads in virtual time, in several processes, and reports."""

import argparse
import csv
import json
import math
from collections.abc import Sequence
from io import StringIO
from itertools import product
from typing import Any, NamedTuple

from orca_jax.helpers.reporting import write_file
from orca_jax.sim.cost import IterationCost, LinearCost
from orca_jax.timeline.read import encoded, load_timeline
from orca_jax.tools.bench.virtual import SimulatedRequest
from orca_jax.tools.bench.workload.generate import READERS, make_workload, workload_settings
from orca_jax.tools.bench.workload.urgency import UrgencyDraws, drawn
from orca_jax.tools.plan.profile import PROFILE, ProfileCost, read_profile
from orca_jax.tools.plan.tables import TABLES, TablesCost, read_tables
from orca_jax.tools.simulate import recorded
from orca_jax.tools.simulate.__main__ import SETTINGS
from orca_jax.tools.simulate.processes import in_processes
from orca_jax.tools.simulate.run import SimulatedRecord, SimulatedRun, simulate
from orca_jax.tools.simulate.why import why
from orca_jax.tools.timeline.fit import fit_cost
from orca_jax.values.checks import is_class_name, require, short, whole_number
from orca_jax.values.errors import ConfigError

OF_POLICIES = ("scheduler_options", "max_num_rows")
"""Settings without effect on schedulers of the package; in a sweep these are run without them."""
RECORDED, AT_ONCE = "as recorded", "at once"
COLUMNS = {
    "requests_per_s": "requests/s", "median_ttft_ms": "median TTFT", "p99_ttft_ms": "p99 TTFT",
    "p99_inter_token_ms": "p99 gap", "median_normalized_latency_ms": "ms/token", "preemptions": "preemptions",
    "late_requests": "late", "overruled_decisions": "overruled",
}  # fmt: skip
FLAGS = {"chosen": "policies", "out": "out"}
COST = "0.02,0.0001"
VOCABULARY = 50_000
MOST_SECONDS = 1e6
"""Of a cost: the sums of longer times lose their digits."""


class _SweepRun(NamedTuple):
    """One run of a sweep."""

    policy: str
    rate: float | None
    seed: int
    args: argparse.Namespace

    @property
    def arrivals(self) -> str:
        """The times of the requests, in words."""
        if self.rate is None:
            if self.args.trace in READERS:
                return RECORDED
            return AT_ONCE
        if math.isinf(self.rate):
            return AT_ONCE
        return f"{self.rate}"

    def simulated(self) -> SimulatedRun:
        """Return the result of the run."""
        args = self.args
        workload = make_workload(
            args.trace,
            num_requests=args.num_requests,
            vocab_size=VOCABULARY,
            seed=self.seed,
            rate=self.rate,
            has_recorded_times=self.arrivals == RECORDED,
            data=args.trace_data,
            length_scale=args.length_scale,
        )
        draws = UrgencyDraws(args, self.seed)
        load = [
            SimulatedRequest(
                each.arrival, each.prompt_ids, each.num_output, urgency=draws.urgency(each.urgency)
            )
            for each in workload
        ]
        names = [name for name in SETTINGS if is_class_name(self.policy) or name not in OF_POLICIES]
        settings = {name: getattr(self.args, name) for name in names if hasattr(self.args, name)}
        return simulate(self.policy, load, _cost(self.args.cost), **settings)

    def figures(self) -> tuple[dict[str, Any], list[SimulatedRecord]]:
        """The figures with the names of the run, and the requests."""
        found = self.simulated()
        policy = found.timeline.head.config.scheduler
        rate = None if self.rate is None or math.isinf(self.rate) else self.rate
        run = {"policy": policy, "rate": rate, "arrivals": self.arrivals, "seed": self.seed}
        cost = found.device.cost
        if isinstance(cost, ProfileCost | TablesCost):
            run["lookups_outside"] = cost.num_outside
        return {**run, **found.figures}, found.records


def run(args: argparse.Namespace) -> int:
    """Run all simulations; print a table and a line of JSON. Return the exit status.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    require(args.jobs >= 1, "jobs", f"jobs must be at least 1, got {args.jobs}")
    if args.recorded is not None:
        given = {name: getattr(args, name) for name in SETTINGS if hasattr(args, name)}
        return recorded.run(args, given, None if args.cost is None else _cost(args.cost))
    for name in ("chosen", "out"):
        require(getattr(args, name) is None, name, f"{FLAGS[name]} is for --recorded; leave it out")
    require(bool(args.policies), "policies", "policies must be at least one, such as chunked")
    args.cost = args.cost or COST
    runs = [
        _SweepRun(*each, args) for each in product(args.policies, args.rate or [None], args.seed)
    ]
    for name in ("timeline", "why"):
        if getattr(args, name) is not None and len(runs) > 1:
            raise ConfigError(
                f"{name} is for one run; give one policy, one rate and one seed", param=name
            )
    if args.why is not None:
        number, _, iteration = map(whole_number, args.why.partition("@"))
        if number is None or iteration is None:
            raise ConfigError(
                f"why must be REQUEST@ITERATION, such as 17@940, got {short(args.why)}", param="why"
            )
        print(why(runs[0].simulated(), number, iteration))
        return 0
    if args.timeline is not None:
        write_file(args.timeline, encoded(runs[0].simulated().lines))
    results = in_processes(_SweepRun.figures, runs, args.jobs)
    if args.csv is not None:
        write_file(args.csv, _csv(results).encode())
    _print([figures for figures, _ in results])
    print(
        json.dumps(
            {
                "runs": [figures for figures, _ in results],
                "cost": args.cost,
                **workload_settings(args),
                **drawn(args),
            }
        )
    )
    return 0


def _cost(text: str) -> IterationCost:
    if text.startswith(PROFILE):
        return read_profile(text)
    if text.startswith(TABLES):
        return read_tables(text)
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        try:
            return fit_cost(load_timeline(text)).cost
        except ConfigError as error:
            raise ConfigError(error.message, param="cost") from error
    is_time = all([0 <= number <= MOST_SECONDS for number in numbers])  # false for nan
    if len(parts) > 3 or not is_time or not sum(numbers):
        message = (
            f"cost must be one to three seconds, not all 0, such as 0.02,0.0001, got {short(text)}"
        )
        raise ConfigError(message, param="cost")
    per_iteration, per_token, per_pair = [*numbers, 0.0, 0.0][:3]
    return LinearCost(per_iteration, per_token, per_pair)


def _csv(results: Sequence[tuple[dict[str, Any], list[SimulatedRecord]]]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("policy", "rate", "seed", *SimulatedRecord._fields))
    for figures, records in results:
        writer.writerows(
            [(figures["policy"], figures["rate"], figures["seed"], *record) for record in records]
        )
    return text.getvalue()


def _print(runs: Sequence[dict[str, Any]]) -> None:
    policies = [each["policy"].partition(" (sha256:")[0] for each in runs]
    names = [
        f"{name}, {each['arrivals']}, seed {each['seed']}"
        for name, each in zip(policies, runs, strict=True)
    ]
    width = max(map(len, names))
    print(f"{'':<{width}}  " + "  ".join(COLUMNS.values()))
    for name, figures in zip(names, runs, strict=True):
        cells = [f"{figures[column]:>{len(title)},.4g}" for column, title in COLUMNS.items()]
        print(f"{name:<{width}}  " + "  ".join(cells))
