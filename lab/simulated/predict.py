"""Predict a held-out run from a recorded one: a cost fitted to one timeline, the arrivals of another in virtual time.

The cost of an iteration has twelve features, such as launches, tokens and pairs of tokens of prompts, increments and
their context. Errors are shares of the recorded figure.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from orca_jax.helpers.reporting import print_table
from orca_jax.sim.cost import windows_of
from orca_jax.timeline.measure import figures
from orca_jax.timeline.read import load_timeline
from orca_jax.tools.bench.replay import replay

PREDICTED = (
    "requests_per_s", "output_tokens_per_s", "median_normalized_latency_ms", "p99_normalized_latency_ms",
    "median_ttft_ms", "p99_ttft_ms", "median_inter_token_ms", "p99_inter_token_ms",
)  # fmt: skip


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument(
        "--timeline",
        required=True,
        metavar="FILE",
        help="timeline to fit the cost to (--trace-file)",
    )
    parser.add_argument(
        "--held-out", required=True, metavar="FILE",
        help="timeline to predict, of the same model and device; its rate, lengths and scheduler may differ",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Fit, predict, print tables and a line of JSON.

    Raises:
        ConfigError: a file is wrong, or has too little in it.
    """
    from lab.simulated.features import fit_features, iteration_errors  # help comes without NumPy

    fit = fit_features(load_timeline(args.timeline))
    held_out = load_timeline(args.held_out)
    errors = {
        "held_out_fifth": fit.held_out,
        "held_out_timeline": iteration_errors(
            fit.cost, held_out.iterations, windows_of(held_out.head.cache.groups)
        ),
    }
    recorded = figures(held_out)
    predicted = figures(replay(held_out, held_out.head.config, fit.cost))
    of_runs = compared(recorded, predicted)
    print_table("fitted cost in seconds", {**fit.cost.weights, "host": fit.cost.host})
    for name, row in errors.items():
        print_table(f"errors of single iterations, {name.replace('_', ' ')}", row)
    print_table(
        f"{'held-out run':<30} {'recorded':>10} {'predicted':>10} {'error':>8}",
        {
            name: f"{row['recorded']:>10,.4g} {row['predicted']:>10,.4g} {_percent(row)}"
            for name, row in of_runs.items()
        },
    )
    line = {"cost": dataclasses.asdict(fit.cost), "iterations": errors, "runs": of_runs}
    print(json.dumps({**line, "timeline": args.timeline, "held_out": args.held_out}))


def compared(
    recorded: Mapping[str, float], predicted: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Each predicted figure beside the recorded one; the error is None if the recorded figure is 0."""
    return {
        name: {
            "recorded": recorded[name],
            "predicted": predicted[name],
            "error": predicted[name] / recorded[name] - 1 if recorded[name] else None,
        }
        for name in PREDICTED
    }


def _percent(row: Mapping[str, Any]) -> str:
    return f"{'-':>8}" if row["error"] is None else f"{row['error']:>+8.1%}"
