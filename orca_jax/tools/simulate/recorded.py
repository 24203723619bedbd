"""Recorded requests again, under other policies: `simulate --recorded FILE --policies all --out PAGE.html`.

The cost of an iteration is fitted to the first half of the recorded requests, and its error is that of the other half.
"""

import argparse
import ast
import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from orca_jax.helpers.reporting import write_file
from orca_jax.sim.cost import IterationCost, LinearCost, windows_of
from orca_jax.timeline.measure import token_times
from orca_jax.tools.bench.virtual import FIRST_ID, SimulatedRequest
from orca_jax.tools.bench.workload.files import RecordedRequest
from orca_jax.tools.bench.workload.records import read_recording
from orca_jax.tools.bench.workload.urgency import drawn
from orca_jax.tools.simulate.__main__ import make_parser
from orca_jax.tools.simulate.processes import in_processes
from orca_jax.tools.simulate.recorded_page import PolicyRow, ReplaySettings, page_of
from orca_jax.tools.simulate.run import SimulatedRun, simulate
from orca_jax.tools.timeline.fit import non_negative, work_in
from orca_jax.values.config import ORDERINGS, SCHEDULERS
from orca_jax.values.errors import ConfigError, OrcaError

BASE = "chunked"
"""The policy that the cost is fitted with; the one of most recorded engines."""
LEAST_BUDGET = 2048  # tokens of an iteration: the default of most recorded engines
MOST_FITTED = 1000  # requests
ROUNDS = 8
UNUSED = (
    *("rate", "seed", "csv", "timeline", "why"),
    *("trace", "num_requests", "trace_data", "length_scale"),
)
"""Flags of the sweep, which have no meaning for a recording."""


class CostFit(NamedTuple):
    """A cost, and its errors.

    Attributes:
        cost: of an iteration.
        is_fitted: False for one that was given.
        errors: shares by which means differ, by the name of the mean.
        replayed: all requests under `BASE` with this cost; None: the recording has no times to compare.
    """

    cost: IterationCost
    is_fitted: bool
    errors: Mapping[str, float]
    replayed: SimulatedRun | None


def run(args: argparse.Namespace, settings: Mapping[str, Any], cost: IterationCost | None) -> int:
    """Fit, replay and write the page. Return the exit status.

    Args:
        args: the flags.
        settings: those of the engine.
        cost: the cost of an iteration; None: it is fitted.

    Raises:
        ConfigError: a setting or the file is wrong.
    """
    usual = make_parser().get_default
    given = [name for name in UNUSED if getattr(args, name) != usual(name)]
    given += drawn(args)
    if given:
        raise ConfigError(f"{given[0]} is not for a recording; leave it out", param=given[0])
    if args.out is None:
        raise ConfigError("recorded needs a page to write; give --out PAGE.html", param="out")
    recording = read_recording(args.recorded)
    load = load_of(recording.requests)
    longest = max([each.num_input for each in recording.requests])
    # most policies need room for a whole prompt
    settings = {"max_num_batched_tokens": max(LEAST_BUDGET, longest), **settings}
    if any(each.blocks for each in recording.requests):
        settings.setdefault("enable_prefix_caching", True)
    fitted = fit(recording.requests, load, cost, settings)
    names = args.policies or args.chosen or ["all"]
    replay = partial(row_of, load=load, cost=fitted.cost, settings=settings)
    policies = expanded(names)
    others = [name for name in policies if name != BASE or fitted.replayed is None]
    rows = in_processes(replay, others, args.jobs) if others else []
    if len(others) < len(policies):
        assert fitted.replayed is not None, "the replay of the fit is the row of its policy"
        rows.insert(policies.index(BASE), PolicyRow(BASE, dict(fitted.replayed.figures), ""))
    replayed = ReplaySettings(
        args.recorded, recording.form, len(load), recording.num_left_out, settings
    )
    page = page_of(replayed, fitted.cost, fitted.errors, rows, is_fitted=fitted.is_fitted)
    write_file(args.out, page.encode())
    for row in rows:
        print(f"{row.policy}: {row.summary}")
    shown = [{"policy": row.policy, "fault": row.fault, **row.figures} for row in rows]
    line = {"form": recording.form, "requests": len(load), "runs": shown, "errors": fitted.errors}
    print(json.dumps({**line, "is_fitted": fitted.is_fitted}))
    return 0


def load_of(requests: Sequence[RecordedRequest]) -> list[SimulatedRequest]:
    """The requests of a simulation; equal blocks are equal ids."""
    numbers: dict[int, int] = {}
    for request in requests:
        for block in request.blocks:
            numbers.setdefault(block, FIRST_ID + len(numbers))
    own = FIRST_ID + len(numbers)
    load = []
    for index, request in enumerate(requests):
        prompt: int | list[int] = request.num_input
        if numbers:
            prompt = []
            for block in request.blocks:
                prompt += [numbers[block]] * min(
                    request.block_size, request.num_input - len(prompt)
                )
            prompt += [own + index] * (request.num_input - len(prompt))
        at = request.arrival - requests[0].arrival
        load.append(SimulatedRequest(at, prompt, request.num_output, urgency=request.urgency))
    return load


def fit(
    requests: Sequence[RecordedRequest],
    load: Sequence[SimulatedRequest],
    cost: IterationCost | None,
    settings: Mapping[str, Any],
) -> CostFit:
    """Fit a cost to the first half of the requests, and measure it on the other half.

    A round simulates the half, counts the work between arrival, first and last token of each request, and solves for
    the seconds of an iteration, of a token and of a pair. The work depends on the cost, so rounds repeat this, and the
    one with the least error is kept.

    Raises:
        ConfigError: the recording has no times, and no cost is given.
    """
    half = min(len(requests) // 2, MOST_FITTED)
    timed = [each for each in requests if each.first_token is not None and each.latency is not None]
    if not timed and cost is None:
        raise ConfigError(
            "this recording has no times of tokens, so no cost can be fitted; give --cost", "cost"
        )
    if cost is not None:
        if not timed:
            return CostFit(cost, False, {}, None)
        whole = simulate(BASE, load, cost, **settings)
        return CostFit(cost, False, errors_of(whole, requests, 0), whole)
    if len(timed) < len(requests) or half < 2:
        raise ConfigError(
            f"recorded needs times of at least 4 requests, and of all: {len(timed)} of "
            f"{len(requests)} have them; give --cost",
            param="recorded",
        )
    best: IterationCost = LinearCost(_gap(requests[:half]), 0.0, 0.0)
    least = float("inf")
    trial = best
    for _ in range(ROUNDS):
        tried = simulate(BASE, load[:half], trial, **settings)
        error = sum(errors_of(tried, requests[:half], 0).values())
        if error < least:
            least = error
            best = trial
        trial = _solved(tried, requests)
    whole = simulate(BASE, load, best, **settings)
    return CostFit(best, True, errors_of(whole, requests, len(requests) // 2), whole)


def _gap(requests: Sequence[RecordedRequest]) -> float:
    """The median seconds between tokens, or of the first one if no request has two."""
    gaps = [each.per_token for each in requests if each.per_token is not None]
    return max(statistics.median(gaps or [each.first_token or 0.0 for each in requests]), 1e-6)


def _solved(run: SimulatedRun, requests: Sequence[RecordedRequest]) -> LinearCost:
    """The cost with the least error of recorded times. Iterations have the members of this run."""
    import numpy as np  # help comes without it

    timeline = run.timeline
    windows = windows_of(timeline.head.cache.groups)
    work = [work_in(each, windows) for each in timeline.iterations]
    # iterations are in progress from the first moment of a pair to the second one
    moments = np.array(
        [(each.collected - each.device, each.collected) for each in timeline.iterations]
    )
    features = np.array([(w.steps, w.num_tokens, w.pairs) for w in work], np.float64)
    after = features.cumsum(axis=0)
    done = np.stack([after - features, after], axis=1).reshape(-1, features.shape[1])
    rows = []
    taken = []
    for n, times in token_times(timeline).items():
        recorded = requests[int(timeline.arrivals[n].request_id)]
        first = recorded.first_token or 0.0
        marks = [timeline.arrivals[n].at, times[0], times[-1]]
        at = np.array([np.interp(marks, moments.ravel(), each) for each in done.T])
        rows += list(np.diff(at, axis=1).T)
        taken += [first, (recorded.latency or 0.0) - first]
    weights = non_negative(np.array(rows), np.array(taken))
    per_iteration, per_token, per_pair = map(float, weights)
    return LinearCost(max(per_iteration, 1e-7), per_token, per_pair)


def errors_of(
    run: SimulatedRun, requests: Sequence[RecordedRequest], begin: int
) -> dict[str, float]:
    """The differences of simulated means by recorded ones, of the requests from an index on."""
    records = [each for each in run.records if each.request >= begin and each.first_token]
    found: dict[str, list[tuple[float, float]]] = {}
    for each in records:
        recorded = requests[each.request]
        if each.first_token is None or each.end is None or recorded.first_token is None:
            continue
        pairs = {
            "first token": (each.first_token - each.arrival, recorded.first_token),
            "latency": (each.end - each.arrival, recorded.latency or 0.0),
        }
        if recorded.per_token is not None:
            ours = (each.end - each.first_token) / (recorded.num_output - 1)
            pairs["per token"] = (ours, recorded.per_token)
        for name, pair in pairs.items():
            found.setdefault(name, []).append(pair)
    return {
        name: abs(sum([one for one, _ in pairs]) / max(sum([two for _, two in pairs]), 1e-9) - 1)
        for name, pairs in found.items()
    }


def expanded(names: Sequence[str]) -> list[str]:
    """The policies of these names; `all` stands for those of the package, and of the shelf in a clone."""
    shelf = [*SCHEDULERS, *[f"{BASE}:{name}" for name in ORDERINGS if name != "fcfs"]]
    folder = Path(__file__).parents[3] / "lab" / "policies"
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and "decide" in {
                each.name for each in node.body if isinstance(each, ast.FunctionDef)
            }:
                shelf.append(f"{path}:{node.name}")
    return list(
        dict.fromkeys([each for name in names for each in (shelf if name == "all" else [name])])
    )


def row_of(
    policy: str,
    load: Sequence[SimulatedRequest],
    cost: IterationCost,
    settings: Mapping[str, Any],
) -> PolicyRow:
    """The figures of a policy. One that cannot serve the load has its error instead."""
    name, _, order = policy.partition(":")
    title = f"{Path(name).stem}:{order}" if name.endswith(".py") else policy
    more: dict[str, Any] = dict(settings)
    if name == BASE and order:
        policy = BASE
        more["scheduling_policy"] = order
    if name in SCHEDULERS:
        traits = SCHEDULERS[name].traits
        if not traits.has_token_budget:
            more.pop("max_num_batched_tokens")
        if not traits.shares_prefixes:
            more.pop("enable_prefix_caching", None)
    try:
        return PolicyRow(title, dict(simulate(policy, load, cost, **more).figures), "")
    except ConfigError:
        raise
    except OrcaError as error:
        return PolicyRow(title, {}, str(error))
