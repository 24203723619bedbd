"""Measure the value of length prediction: the order of each predictor, and the latency under it.

Requests and true lengths come from `lab/measured/log_lengths.py`, on questions outside of all training data.
All requests have the same `max_tokens`. One comparison runs on the engine. The table over loads and seeds is
simulated, with an iteration cost fitted to the first pass on the engine; 100 % load is the throughput with all
requests at once.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.logged_answers import (
    LoggedAnswers,
    PassRunner,
    Served,
    latency_figures,
    poisson,
    read_answers,
)
from orca_jax.assembly.engine import build_engine
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.bundled import ranker_directory
from orca_jax.helpers.reporting import hardware, print_table, print_warning
from orca_jax.sched.pool import ClientBound
from orca_jax.sched.predict import EnginePredictor, Oracle, RunningQuantiles, Scored
from orca_jax.sched.request import Request
from orca_jax.sim.cost import LinearCost
from orca_jax.tools.timeline.fit import Fit, fit_cost
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import SamplingParams

if TYPE_CHECKING:
    from orca_jax.tools.ranker.scorer import Scorer


class TimedScorer:
    """A scorer that measures its time."""

    def __init__(self, scorer: "Scorer") -> None:
        self._scorer = scorer
        self.seconds = 0.0

    def __call__(self, prompt_ids: Sequence[int]) -> float:
        start = time.perf_counter()
        tokens = self._scorer(prompt_ids)
        self.seconds += time.perf_counter() - start
        return tokens


@dataclass(frozen=True)
class Contestant:
    """An ordering with its predictor."""

    policy: str
    predictor: Callable[[LoggedAnswers], EnginePredictor]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    parser.add_argument(
        "--log", required=True, metavar="FILE", help="file written by lab/measured/log_lengths.py"
    )
    parser.add_argument(
        "--ranker",
        default="demo",
        metavar="NAME",
        help='length ranker: "demo" or a directory (default: demo)',
    )
    add_number(parser, "--max-tokens", 400, "max_tokens of every request")
    add_number(parser, "--load", [0.8, 1.2], "simulated loads", nargs="+", metavar="X")
    add_number(parser, "--seeds", 5, "simulated runs per load")
    add_number(parser, "--num-requests", 600, "requests per simulated run")
    add_number(parser, "--real-requests", 80, "requests per pass of the engine")
    add_number(parser, "--real-load", 1.2, "load of the engine in these passes", metavar="X")
    # Each contestant has its ordering and its predictor, and the timelines stay in memory.
    chosen = ("scheduling_policy", "length_predictor", "trace_file")
    add_engine_args(parser, without=chosen, model="demo", scheduler="chunked", max_num_seqs=16)


def run(args: argparse.Namespace) -> None:
    """Measure and simulate; print tables and a line of JSON."""
    if (
        min(args.seeds, args.num_requests, args.real_requests) < 1
        or min(*args.load, args.real_load) <= 0
    ):
        raise ConfigError(
            "seeds, num_requests and real_requests must be at least 1, and loads above 0", "load"
        )
    answers = read_answers(args.log, args.max_tokens)
    from orca_jax.tools.ranker.storage import load_scorer  # it imports JAX, and help comes at once

    scorer = load_scorer(ranker_directory(args.ranker))
    config = engine_config_from_args(args)
    with build_engine(config) as built:
        runner = PassRunner(built, config)
        real, fit = _on_the_engine(runner, answers, scorer, args)
    taus = {
        name: _tau(contestant.predictor(answers), answers)
        for name, contestant in _contestants(scorer).items()
        if name != "fcfs"
    }
    print_table("Kendall's tau against the true lengths", taus)
    simulated = _simulate(runner, answers, scorer, fit.cost, args)
    print_warning(fit.warning)
    settings = {
        name: getattr(args, name)
        for name in ("log", "ranker", "load", "seeds", "num_requests", "real_load")
    }
    line = {
        "tau": taus,
        "real": real,
        "simulated": simulated,
        "cost": dataclasses.asdict(fit.cost),
        "args": settings,
    }
    print(json.dumps({**line, "hardware": hardware(), "config": dataclasses.asdict(config)}))


def _contestants(score: Callable[[Sequence[int]], float]) -> dict[str, Contestant]:
    return {
        "fcfs": Contestant("fcfs", lambda answers: ClientBound()),
        "bound": Contestant("shortest", lambda answers: ClientBound()),
        "quantiles": Contestant("shortest", lambda answers: RunningQuantiles()),
        "learned": Contestant("shortest", lambda answers: Scored(score)),
        "oracle": Contestant("shortest", lambda answers: Oracle(answers.by_name())),
    }


def _on_the_engine(
    runner: PassRunner, answers: LoggedAnswers, scorer: "Scorer", args: argparse.Namespace
) -> tuple[dict[str, object], Fit]:
    """Run every contestant at one load, after a pass that yields the lengths of the answers and the iteration cost."""
    drawn = answers.draw(args.real_requests, args.seed)
    first, timeline = runner.real(drawn, [0.0] * args.real_requests, "fcfs", ClientBound())
    fit = fit_cost(timeline)
    print_table("fitted cost in seconds", fit.shown)
    print_warning(fit.warning)
    known = dataclasses.replace(drawn, lengths=first.lengths)
    capacity = _capacity(runner, answers, fit.cost)
    arrivals = poisson(args.real_requests, args.real_load * capacity, args.seed)
    timed = TimedScorer(scorer)
    shown = dict[str, object]()
    for name, contestant in _contestants(timed).items():
        if name == "bound":
            continue  # all bounds are equal, so the order is that of arrival
        served, _ = runner.real(known, arrivals, contestant.policy, contestant.predictor(known))
        shown[name] = dict(latency_figures([served]))
        print_table(
            f"{name}, on the engine at {args.real_load:.0%} load", latency_figures([served])
        )
        if name == "learned":
            shown["ranker_share"] = timed.seconds / served.wall
            shown["ranker_us"] = 1e6 * timed.seconds / args.real_requests
            print_table("the ranker", {key: shown[key] for key in ("ranker_share", "ranker_us")})
    fitted = {"r_squared": fit.r_squared, "fit_warning": fit.warning}
    return {**shown, **fitted, "requests": args.real_requests}, fit


def _simulate(
    runner: PassRunner,
    answers: LoggedAnswers,
    scorer: "Scorer",
    cost: LinearCost,
    args: argparse.Namespace,
) -> list[dict[str, object]]:
    drawn = {seed: answers.draw(args.num_requests, seed) for seed in range(args.seeds)}
    capacity = {seed: _capacity(runner, one, cost) for seed, one in drawn.items()}
    rows: list[dict[str, object]] = []
    for load in args.load:
        for name, contestant in _contestants(scorer).items():
            passes: list[Served] = []
            for seed, one in drawn.items():
                arrivals = poisson(args.num_requests, load * capacity[seed], seed)
                passes.append(
                    runner.simulated(
                        one, arrivals, contestant.policy, contestant.predictor(one), cost
                    )
                )
            rows.append({"load": load, "order": name, **latency_figures(passes)})
            print_table(f"{name}, simulated at {load:.0%} load", latency_figures(passes))
    return rows


def _capacity(runner: PassRunner, answers: LoggedAnswers, cost: LinearCost) -> float:
    """Return the requests per second with all requests waiting from the start."""
    at_once = [0.0] * len(answers.prompts)
    return len(at_once) / runner.simulated(answers, at_once, "fcfs", ClientBound(), cost).wall


def _tau(predictor: EnginePredictor, answers: LoggedAnswers) -> float:
    """Return Kendall's tau of the predictions, with each request arriving after the end of the one before it."""
    guesses = []
    for n, (prompt, length) in enumerate(zip(answers.prompts, answers.lengths, strict=True)):
        params = SamplingParams(max_tokens=answers.max_tokens)
        request = Request(
            str(n), list(prompt), params, arrival=0.0, arrival_index=n, seed=0, stop_ids=frozenset()
        )
        guesses.append(predictor.predict(request, prompt))
        predictor.observe(request, length)
    import numpy as np

    from lab.rank_correlation import kendall_tau

    return kendall_tau(np.asarray(guesses), np.asarray(answers.lengths, float))
