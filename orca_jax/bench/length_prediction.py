"""What predicting lengths is worth: how well each predictor orders the demo's answers, and how long callers wait.

Requests and true lengths come from `scripts/log_lengths.py` on questions that nobody was trained on; every caller gives
the same bound. One comparison runs on the engine itself. The table over loads and seeds is simulated, with a cost of
an iteration that is fitted to the engine's first pass; there, 100 % load is what serves all requests at once.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from orca_jax.bench.logged_answers import Answers, Served, Stage, figures, poisson, read_answers
from orca_jax.build.engine import build_engine
from orca_jax.bundled import ranker_directory
from orca_jax.config import OrderingName
from orca_jax.errors import ConfigError
from orca_jax.flags import add_engine_args, engine_config_from_args
from orca_jax.ranker.rank_correlation import kendall_tau
from orca_jax.ranker.scorer import Scorer
from orca_jax.ranker.storage import load_scorer
from orca_jax.reporting import hardware, print_table
from orca_jax.request import Request, SamplingParams
from orca_jax.sched.predict import ClientBound, Oracle, Predictor, RunningQuantiles, Scored
from orca_jax.sim.cost import LinearCost
from orca_jax.timeline.fit import fit_cost

HELP = "what predicting lengths is worth, on the demo's word problems"


class Timed:
    """A scorer that adds up its time."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.seconds = 0.0

    def __call__(self, prompt_ids: Sequence[int]) -> float:
        start = time.perf_counter()
        tokens = self._scorer(prompt_ids)
        self.seconds += time.perf_counter() - start
        return tokens


@dataclass(frozen=True)
class Rival:
    """An order, and who predicts for it."""

    policy: OrderingName
    predictor: Callable[[Answers], Predictor]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark and of the engine."""
    parser.add_argument("--log", required=True, metavar="FILE", help="what scripts/log_lengths.py has written")
    parser.add_argument("--ranker", default="demo", metavar="NAME", help='"demo" or a directory (default: demo)')
    parser.add_argument("--max-tokens", type=int, default=400, metavar="N", help="every caller's bound (default: 400)")
    parser.add_argument(
        "--load", type=float, nargs="+", default=[0.8, 1.2], metavar="X", help="simulated (default: 0.8 1.2)"
    )
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="simulated runs of each (default: 5)")
    parser.add_argument("--num-requests", type=int, default=600, metavar="N", help="of each of them (default: 600)")
    parser.add_argument(
        "--real-requests", type=int, default=80, metavar="N", help="of each pass of the engine (default: 80)"
    )
    parser.add_argument("--real-load", type=float, default=1.2, metavar="X", help="of these (default: 1.2)")
    add_engine_args(parser, model="demo", scheduler="chunked", max_num_seqs=16)


def run(args: argparse.Namespace) -> None:
    """Measure, simulate, and print tables and a line of JSON."""
    if min(args.seeds, args.num_requests, args.real_requests) < 1 or min(*args.load, args.real_load) <= 0:
        raise ConfigError("seeds, num_requests and real_requests must be at least 1, and loads above 0", "load")
    answers = read_answers(args.log, args.max_tokens)
    scorer = load_scorer(ranker_directory(args.ranker))
    config = engine_config_from_args(args)
    with build_engine(config) as built:
        stage = Stage(built, config)
        real, cost = _on_the_engine(stage, answers, scorer, args)
    taus = {name: _tau(rival.predictor(answers), answers) for name, rival in _rivals(scorer).items() if name != "fcfs"}
    print_table("Kendall's tau against the true lengths", taus)
    simulated = _simulate(stage, answers, scorer, cost, args)
    told = {name: getattr(args, name) for name in ("log", "ranker", "load", "seeds", "num_requests", "real_load")}
    line = {"tau": taus, "real": real, "simulated": simulated, "cost": dataclasses.asdict(cost), "args": told}
    print(json.dumps({**line, "hardware": hardware(), "config": dataclasses.asdict(config)}))


def _rivals(score: Callable[[Sequence[int]], float]) -> dict[str, Rival]:
    return {
        "fcfs": Rival("fcfs", lambda answers: ClientBound()),
        "bound": Rival("shortest", lambda answers: ClientBound()),
        "quantiles": Rival("shortest", lambda answers: RunningQuantiles()),
        "learned": Rival("shortest", lambda answers: Scored(score)),
        "oracle": Rival("shortest", lambda answers: Oracle(answers.by_name())),
    }


def _on_the_engine(
    stage: Stage, answers: Answers, scorer: Scorer, args: argparse.Namespace
) -> tuple[dict[str, object], LinearCost]:
    """Everybody once at one load, after a pass that says how long answers are and what iterations cost."""
    asked = answers.draw(args.real_requests, args.seed)
    first, trace = stage.real(asked, [0.0] * args.real_requests, "fcfs", ClientBound())
    fit = fit_cost(trace)
    print_table("fitted cost in seconds", {**dataclasses.asdict(fit.cost), "r_squared": fit.r_squared})
    known = dataclasses.replace(asked, lengths=first.lengths)
    capacity = _capacity(stage, answers, fit.cost)
    arrivals = poisson(args.real_requests, args.real_load * capacity, args.seed)
    timed, shown = Timed(scorer), dict[str, object]()
    for name, rival in _rivals(timed).items():
        if name == "bound":
            continue  # everybody's bound is the same, so it is the order of arrival again
        served, _ = stage.real(known, arrivals, rival.policy, rival.predictor(known))
        shown[name] = dict(figures([served]))
        print_table(f"{name}, on the engine at {args.real_load:.0%} load", figures([served]))
        if name == "learned":
            shown["ranker_share"] = timed.seconds / served.wall
            shown["ranker_us"] = 1e6 * timed.seconds / args.real_requests
            print_table("the ranker", {key: shown[key] for key in ("ranker_share", "ranker_us")})
    return {**shown, "r_squared": fit.r_squared, "requests": args.real_requests}, fit.cost


def _simulate(
    stage: Stage, answers: Answers, scorer: Scorer, cost: LinearCost, args: argparse.Namespace
) -> list[dict[str, object]]:
    asked = {seed: answers.draw(args.num_requests, seed) for seed in range(args.seeds)}
    capacity = {seed: _capacity(stage, one, cost) for seed, one in asked.items()}
    rows: list[dict[str, object]] = []
    for load in args.load:
        for name, rival in _rivals(scorer).items():
            passes: list[Served] = []
            for seed, one in asked.items():
                arrivals = poisson(args.num_requests, load * capacity[seed], seed)
                passes.append(stage.simulated(one, arrivals, rival.policy, rival.predictor(one), cost))
            rows.append({"load": load, "order": name, **figures(passes)})
            print_table(f"{name}, simulated at {load:.0%} load", figures(passes))
    return rows


def _capacity(stage: Stage, answers: Answers, cost: LinearCost) -> float:
    """Requests per second while there are always some to choose from."""
    at_once = [0.0] * len(answers.prompts)
    return len(at_once) / stage.simulated(answers, at_once, "fcfs", ClientBound(), cost).wall


def _tau(predictor: Predictor, answers: Answers) -> float:
    """Of its guesses, if each request came after the one before it had ended."""
    guesses = []
    for n, (prompt, length) in enumerate(zip(answers.prompts, answers.lengths, strict=True)):
        params = SamplingParams(max_tokens=answers.max_tokens)
        request = Request(str(n), list(prompt), params, arrival=0.0, arrival_index=n, seed=0, stop_ids=frozenset())
        guesses.append(predictor.predict(request))
        request.generated_ids = [0] * length
        predictor.observe(request)
    return kendall_tau(np.asarray(guesses), np.asarray(answers.lengths, float))
