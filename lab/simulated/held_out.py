"""Record runs of an engine, fit a cost to them, and predict held-out runs: other seed, rate, lengths and batch size.

Fitting runs and held-out runs alternate in time, and each held-out run is recorded twice, so that the noise of the
machine is beside the errors. A prediction serves the same arrivals with the same scheduler on a simulated device, and
is measured in the same way. `--held-out-model` predicts another model too: each weight of the cost is multiplied by
the ratio of the work that it stands for, except for the time to submit an iteration. Errors are shares of the
recorded figure.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from lab.paper.runs import Lengths, RunResult, paper_lengths
from lab.paper.systems import System, parse_system
from lab.real.curves import arrivals_at, steady_throughput
from lab.real.laboratory import Laboratory, settings_of
from lab.real.opening import open_laboratory, recording, surroundings
from lab.real.page import HELD_OUT, SHOWN, check_docs, write_result
from lab.simulated.cost import FeatureCost
from lab.simulated.prediction import launch_overhead, predicted_run, scaled_cost, skewed_lengths
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.reporting import print_table, rounded
from orca_jax.sim.cost import windows_of
from orca_jax.timeline.measure import Timeline
from orca_jax.values.errors import ConfigError

FIT_LOADS = (0.5, 0.95, 0.75)
"""Arrival rates of the fitting runs, as multiples of the throughput with all requests at once."""
HELD_OUT_LOAD = 0.65
PASSES = 2
"""Recordings of each held-out run."""
Figures = Mapping[str, float]
Costs = Mapping[str, FeatureCost]
"""The cost by the kind of system."""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    parser.add_argument(
        "--fit", nargs="+", default=["orca(16)", "chunked(16)"], metavar="NAME",
        help="systems of the fitting runs (default: orca(16) chunked(16))",
    )  # fmt: skip
    parser.add_argument(
        "--predict", nargs="+", default=["orca(12)", "chunked(12)"], metavar="NAME",
        help="systems of the held-out runs (default: orca(12) chunked(12))",
    )  # fmt: skip
    add_number(parser, "--num-requests", 80, "requests of each run, at least 20")
    parser.add_argument(
        "--held-out-model",
        metavar="MODEL",
        help="also predict this model by the scaled cost of --model",
    )
    parser.add_argument("--docs", metavar="DIRECTORY", help="write measured/held-out.json here")
    add_engine_args(
        parser,
        without=("scheduler", "max_num_seqs", "trace_file", "n_workers"),
        model="preset:gpt2",
    )


@dataclass(frozen=True)
class Condition:
    """A held-out run: a system, its requests, and their arrivals."""

    system: System
    requests: Sequence[Lengths]
    arrivals: Sequence[float]
    seed: int


def run(args: argparse.Namespace) -> None:
    """Record, fit and predict; print tables and a line of JSON.

    Raises:
        ConfigError: a flag is wrong; `param` names it.
    """
    if args.num_requests < 20:
        raise ConfigError(
            f"num_requests must be at least 20, got {args.num_requests}", param="num_requests"
        )
    check_docs(args.docs)
    config = engine_config_from_args(args)
    fits = [parse_system(name) for name in args.fit]
    held = [parse_system(name) for name in args.predict]
    about = surroundings(config)
    start = time.monotonic()
    with open_laboratory(config, [*fits, *held]) as laboratory:
        found, costs, overhead = measure(laboratory, fits, held, args.num_requests)
        model = laboratory.model
        dtype = laboratory.dtype
    line: dict[str, Any] = {"model": {"name": config.model, **found}}
    if args.held_out_model is not None:
        other = replace(config, model=args.held_out_model)
        for system in held:
            settings_of(system, other)
        with open_laboratory(other, held) as laboratory:
            scaled = {
                kind: scaled_cost(cost, model, laboratory.model, overhead)
                for kind, cost in costs.items()
            }
            line["held_out_model"] = measure_model(laboratory, held, scaled, args.num_requests)
    settings = {
        "num_requests": args.num_requests,
        "passes": PASSES,
        "fit_loads": FIT_LOADS,
        "load": HELD_OUT_LOAD,
    }
    line = rounded(
        {**line, **settings, "dtype": dtype, "seconds": time.monotonic() - start} | about
    )
    if args.docs is not None:
        write_result(args.docs, HELD_OUT, line)
    print(json.dumps(line))


def measure(
    laboratory: Laboratory, fits: Sequence[System], held: Sequence[System], count: int
) -> tuple[dict[str, Any], Costs, float]:
    """Record the fitting runs and the held-out runs of one model in alternation; predict the latter.

    Each kind of system has a cost of its own, since iterations that overlap hide a part of the host's time. Returns
    the result, the costs, and the seconds of an iteration that do not depend on the model.
    """
    seed = laboratory.config.seed
    scale = laboratory.scale
    requests = paper_lengths(count, seed, scale)
    fitting: dict[str, list[Timeline]] = {system.kind: [] for system in fits}
    tops = {}
    for system in fits:
        with recording(laboratory, fitting[system.kind]):
            tops[system.name] = _saturation(laboratory, system, requests)
    conditions = conditions_of(held, count, seed + 1, scale, min(tops.values()) * _tokens(requests))
    recorded: dict[str, list[Figures]] = {name: [] for name in conditions}
    timelines: dict[str, list[Timeline]] = {name: [] for name in conditions}
    waiting = list(conditions) * PASSES
    slots = list(product(FIT_LOADS, fits))
    for number, (load, system) in enumerate(slots, 1):
        with recording(laboratory, fitting[system.kind]):
            laboratory.serve_requests(
                system, requests, arrivals_at(load * tops[system.name], count, seed), seed=seed
            )
        while len(waiting) > (len(slots) - number) * len(conditions) * PASSES / len(slots):
            name = waiting.pop(0)
            recorded[name].append(_recorded(laboratory, conditions[name], timelines[name]))
            print(f"  recorded {name}", flush=True)
    from lab.simulated.features import fit_features  # help comes without NumPy

    fit = {kind: fit_features(each[0], *each[1:]) for kind, each in fitting.items()}
    costs = {kind: each.cost for kind, each in fit.items()}
    for kind, cost in costs.items():
        print_table(f"fitted cost of {kind} in seconds", {**cost.weights, "host": cost.host})
    runs = predict(laboratory, conditions, recorded, costs)
    errors = {
        f"{kind}, held-out fifth of the fitting runs": each.held_out for kind, each in fit.items()
    }
    errors |= _iteration_errors(conditions, timelines, costs)
    shown = {kind: dataclasses.asdict(cost) for kind, cost in costs.items()}
    overhead = launch_overhead(chain.from_iterable(fitting.values()))
    found = {
        "saturation": tops,
        "costs": shown,
        "overhead": overhead,
        "iterations": errors,
        "runs": runs,
    }
    return found, costs, overhead


def measure_model(
    laboratory: Laboratory, held: Sequence[System], costs: Costs, count: int
) -> dict[str, Any]:
    """Record runs of a model that the cost was not fitted to, and predict them."""
    seed = laboratory.config.seed
    scale = laboratory.scale
    requests = paper_lengths(count, seed, scale)
    top = min([_saturation(laboratory, each, requests) for each in held])
    conditions = conditions_of(held, count, seed + 1, scale, top * _tokens(requests))
    timelines: dict[str, list[Timeline]] = {name: [] for name in conditions}
    recorded: dict[str, list[Figures]] = {}
    for name, one in conditions.items():
        recorded[name] = [_recorded(laboratory, one, timelines[name]) for _ in range(PASSES)]
    runs = predict(laboratory, conditions, recorded, costs)
    errors = _iteration_errors(conditions, timelines, costs)
    return {"name": laboratory.config.model, "iterations": errors, "runs": runs}


def conditions_of(
    held: Sequence[System], count: int, seed: int, scale: float, tokens_per_s: float
) -> dict[str, Condition]:
    """The held-out runs by name: each system with all requests at once, and at a rate below the saturation."""
    requests = skewed_lengths(count, seed, scale)
    rate = HELD_OUT_LOAD * tokens_per_s / _tokens(requests)
    found = {}
    for system in held:
        found[f"{system.name}, all at once"] = Condition(system, requests, [0.0] * count, seed)
        found[f"{system.name}, {rate:.3g} requests/s"] = Condition(
            system, requests, arrivals_at(rate, count, seed), seed
        )
    return found


def predict(
    laboratory: Laboratory,
    conditions: Mapping[str, Condition],
    recorded: Mapping[str, Sequence[Figures]],
    costs: Costs,
) -> dict[str, Any]:
    """Predict the runs; print and return each figure as recorded, predicted, error, and spread of the recordings."""
    found = {}
    for name, one in conditions.items():
        result = predicted_run(
            laboratory, one.system, cost_of(costs, one.system), one.requests, one.arrivals, one.seed
        )
        found[name] = compared(recorded[name], figures_of(result, one.arrivals))
        print_table(
            f"{name:<34} {'recorded':>10} {'predicted':>10} {'error':>8} {'spread':>8}",
            {
                SHOWN[
                    key
                ]: f"{row['recorded']:>16,.4g} {row['predicted']:>10,.4g} {row['error']:>+8.1%} "
                f"{row['spread']:>8.1%}"
                for key, row in found[name].items()
            },
        )
    return found


def compared(recorded: Sequence[Figures], predicted: Figures) -> dict[str, dict[str, Any]]:
    """The mean of the recordings, the prediction, its error, and the recordings' range as a share of their mean."""
    rows = {}
    for name in SHOWN:
        if name not in predicted or any(name not in each for each in recorded):
            continue
        values = [each[name] for each in recorded]
        mean = sum(values) / len(values)
        rows[name] = {
            "recorded": mean,
            "predicted": predicted[name],
            "error": predicted[name] / mean - 1,
            "spread": (max(values) - min(values)) / mean,
        }
    return rows


def figures_of(result: RunResult, arrivals: Sequence[float]) -> dict[str, float]:
    """The figures of a run; without arrivals over time, the throughput is that of all requests until the last end."""
    found = result.figures
    found["requests_per_s"] = len(result.ends) / (max(result.ends) - arrivals[0])
    return found


def _recorded(
    laboratory: Laboratory, one: Condition, timelines: list[Timeline]
) -> dict[str, float]:
    with recording(laboratory, timelines):
        return figures_of(
            laboratory.serve_requests(one.system, one.requests, one.arrivals, seed=one.seed),
            one.arrivals,
        )


def _saturation(laboratory: Laboratory, system: System, requests: Sequence[Lengths]) -> float:
    """Requests per second with all requests there from the start."""
    arrivals = [0.0] * len(requests)
    return steady_throughput(
        laboratory.serve_requests(system, requests, arrivals, seed=laboratory.config.seed).ends
    )


def _tokens(requests: Sequence[Lengths]) -> float:
    """Mean tokens of a request, prompt and output."""
    return sum(request.num_prompt + request.num_generated for request in requests) / len(requests)


def cost_of(costs: Costs, system: System) -> FeatureCost:
    """The cost for a system: that of its kind, or else of the first kind."""
    return costs.get(system.kind, next(iter(costs.values())))


def _iteration_errors(
    conditions: Mapping[str, Condition], timelines: Mapping[str, Sequence[Timeline]], costs: Costs
) -> dict[str, Mapping[str, float]]:
    """The errors of the cost for the device times of single iterations, by held-out run."""
    from lab.simulated.features import iteration_errors

    found = {}
    for name, one in conditions.items():
        iterations = list(chain.from_iterable(each.iterations for each in timelines[name]))
        windows = windows_of(timelines[name][0].head.cache.groups)
        found[name] = iteration_errors(cost_of(costs, one.system), iterations, windows)
        print_table(f"errors of single iterations, {name}", found[name])
    return found
