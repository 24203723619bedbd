"""`python -m lab gpus`: runs of an engine on GPUs, repeated in virtual time from measured kernels.

What is fitted to which run is in `runs.py`; all else is held out. A mean outside of its limit is an exit status of 1.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from lab.gpus.plans import planned, plans_text
from lab.gpus.runs import RUNS, GpuRun, RecordedTimes, own_requests, their_errors
from lab.pages.markdown import table, write_between
from orca_jax.helpers.reporting import percentile
from orca_jax.tools.plan.profile import PROFILE, read_profile
from orca_jax.tools.simulate.run import simulate
from orca_jax.values.errors import ConfigError

PAGE = Path("docs/real_gpus.md")
BEGIN = "<!-- begin: python -m lab gpus --data DIR --write -->\n"
END = "<!-- end -->"
TITLES = {"first_token": "TTFT", "per_token": "TPOT", "latency": "Latency"}
SUMMARIES = {"mean": "Mean", "median": "Median", "p90": "P90", "p99": "P99"}


class GpuResult(NamedTuple):
    """The result of a run: measured seconds and errors of the simulation, by metric and summary."""

    run: GpuRun
    measured: Mapping[tuple[str, str], float]
    errors: Mapping[tuple[str, str], float]
    theirs: Mapping[str, float]
    num_outside: int
    preemptions: int

    def is_within(self, metric: str) -> bool:
        """Return True if the error of a mean is within its limit."""
        limit: float | None = getattr(self.run.limits, metric)
        return limit is None or abs(self.errors[metric, "mean"]) <= limit


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder of recordings and tables"
    )
    parser.add_argument("--write", action="store_true", help=f"write the tables into {PAGE}")


def run(args: argparse.Namespace) -> int:
    """Print the table of all runs. Return 1 if a mean is outside of its limit.

    Raises:
        ConfigError: a file is missing or wrong; `param` names the flag.
    """
    results = [repeated(each, args.data) for each in RUNS]
    text = _table(results)
    plans = [planned(each, args.data) for each in RUNS]
    text += plans_text(plans)
    print(text, end="")
    if args.write:
        write_between(PAGE, BEGIN, END, text)
    is_within = all(result.is_within(name) for result in results for name in TITLES)
    return int(not (is_within and all(plan.is_within for plan in plans)))


def repeated(each: GpuRun, folder: Path) -> GpuResult:
    """Repeat a recorded run in virtual time. Raises ConfigError: a file is missing or wrong."""
    cost = read_profile(f"{PROFILE}{folder}/{each.cost}")
    requests, recorded = own_requests(each, folder)
    try:
        path = folder / each.recording.replace("requests.jsonl", "their_errors.txt")
        theirs = their_errors(path)
    except OSError as error:
        raise ConfigError(f"{folder}: {error}", param="data") from error
    simulated = simulate("chunked", requests, cost, **each.settings)
    records = sorted(simulated.records, key=lambda record: record.request)
    times = []
    for record in records:
        assert record.first_token is not None and record.end is not None
        generation = record.end - record.first_token
        times.append(
            RecordedTimes(
                record.first_token - record.arrival,
                generation / (record.output - 1),
                record.end - record.arrival,
            )
        )
    measured = _summaries(recorded)
    ours = _summaries(times)
    errors = {key: ours[key] / measured[key] - 1 for key in measured}
    preemptions = sum(record.preemptions for record in records)
    return GpuResult(each, measured, errors, theirs, cost.num_outside, preemptions)


def _summaries(times: Sequence[RecordedTimes]) -> dict[tuple[str, str], float]:
    """The mean, median, 90th and 99th percentile of each metric."""
    found = {}
    for name in TITLES:
        values = [getattr(each, name) for each in times]
        found[name, "mean"] = mean(values)
        for summary, percent in (("median", 50), ("p90", 90), ("p99", 99)):
            found[name, summary] = percentile(values, percent)
    return found


def _table(results: Sequence[GpuResult]) -> str:
    rows = []
    for result in results:
        for metric, title in TITLES.items():
            rows.append(_row(result, metric, title))
    head = ["run", "metric", "mean, s", "error of mean", "limit", "median", "p90", "p99"]
    head.append("LLMServingSim's errors of mean, median, p90, p99")
    text = table(head, rows)
    for result in results:
        text += (
            f"\n- {result.run.title}: {result.preemptions} preemptions, {result.num_outside} lookups outside of the "
            f"tables. Not from tables: {result.run.assumed}."
        )
    return text + "\n"


def _row(result: GpuResult, metric: str, title: str) -> list[str]:
    limit: float | None = getattr(result.run.limits, metric)
    verdict = "" if result.is_within(metric) else " FAIL"
    theirs = [result.theirs[f"{title} {name}"] for name in SUMMARIES.values()]
    return [
        result.run.title,
        title,
        f"{result.measured[metric, 'mean']:.3f}",
        f"{result.errors[metric, 'mean']:+.1%}{verdict}",
        "" if limit is None else f"{limit:.0%}",
        *[f"{result.errors[metric, name]:+.1%}" for name in SUMMARIES if name != "mean"],
        ", ".join([f"{each:+.1%}" for each in theirs]),
    ]
