"""Timeline the recorded arrivals through a scheduler again, on a virtual clock.

The cost of an iteration is a line fitted to the recorded ones: by tokens (padding included) and by pairs of tokens in
attention. A flag that is not given is as recorded. The length predictor may also be "oracle", which knows the lengths
in the file.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import get_type_hints

import msgspec

from orca_jax.bench.feed import advance, feed
from orca_jax.build.scheduler import PREDICTORS, build_scheduling
from orca_jax.config import EngineConfig
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.flags import HELP as FLAG_HELP
from orca_jax.flags import options_for
from orca_jax.reporting import cpu_name, print_table
from orca_jax.request import SamplingParams, Urgency
from orca_jax.sched.predict import Oracle, Predictor
from orca_jax.sim.cost import LinearCost
from orca_jax.sim.executor import END_ID, OTHER_ID, SimExecutor, VirtualClock
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.timeline.fit import fit_cost
from orca_jax.timeline.read import Timeline, figures, load_timeline, parse_timeline
from orca_jax.timeline.views import add_file_args, write_views
from orca_jax.timeline.writer import Arrival, TimelineHeader, TimelineWriter

ORACLE = "oracle"
"""A length predictor that only a replay has."""
_FIRST_ID = OTHER_ID + 1  # of prompts


HELP = "recorded arrivals under another scheduler, on a virtual clock"
_FLAGS = (
    "scheduler", "scheduling_policy", "length_predictor", "max_num_seqs", "max_num_batched_tokens", "overlap",
    "check_in_intervals", "enable_prefix_caching", "n_workers", "n_slots", "num_pages",
)  # fmt: skip


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the files to read and to write, and the settings that a replay can change."""
    add_file_args(parser)
    hints = get_type_hints(EngineConfig)
    for name in _FLAGS:
        flag, options = f"--{name.replace('_', '-')}", options_for(hints[name], name)
        parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=FLAG_HELP[name], **options)


def run(args: argparse.Namespace) -> None:
    """Replay a file, and print recorded and replayed figures side by side.

    Raises:
        ConfigError: the file or a setting is wrong.
    """
    recording = load_timeline(args.file)
    fit = fit_cost(recording)
    changes = {name: getattr(args, name) for name in _FLAGS if hasattr(args, name)}
    again = replay(recording, replace(recording.head.config, **changes), fit.cost)
    write_views(again, args)
    recorded, replayed = figures(recording), figures(again)
    cost = {name: value for name, value in dataclasses.asdict(fit.cost).items() if name != "buckets"}
    print_table("fitted cost in seconds", {**cost, "r_squared": fit.r_squared})
    print_table(f"{'recorded, then replayed with':<28} {changes or 'nothing changed'}", _columns(recorded, replayed))
    line = {
        "recorded": recorded,
        "replayed": replayed,
        "fit": {**cost, "r_squared": fit.r_squared},
        "config": dataclasses.asdict(again.head.config),
        "trace": args.file,
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count()},  # of the replay; its figures do not depend on it
    }
    print(json.dumps(line))


def replay(run: Timeline, config: EngineConfig, cost: LinearCost) -> Timeline:
    """What the run would have been under `config`, by a simulation.

    Every request arrives when it did and generates as many tokens as it did. Those without an end in the trace, or
    with an end before their first token, are left out. Prompts share pages as they did where the recorded engine
    reused prefixes; else each is unlike all others.

    A length predictor that learns while it serves learns again; what another one said then is in the trace, and holds
    again. "oracle" knows how many tokens each request generated.

    Raises:
        ConfigError: a setting is wrong, or no request is left.
    """
    if not run.iterations:
        raise ConfigError("the trace has no iteration, so there is nothing to replay", param="trace")
    arrivals = [each for each in run.arrivals.values() if each.n in run.ends and run.ends[each.n].generated]
    if not arrivals:
        raise ConfigError("no request of the trace has generated a token, so there is nothing to replay", param="trace")
    prompts = _prompts(run, arrivals)
    model = replace(TOY_MODEL, vocab_size=max(max(prompt) for prompt in prompts) + 1, eos_token_ids=(END_ID,))
    lengths = {str(each.n): run.ends[each.n].generated for each in arrivals}
    parts: list[bytes] = []
    clock = VirtualClock(max(arrivals[0].at, run.iterations[0].selected))  # a batch is queued before anything runs
    head = _head(run, config)
    writer = TimelineWriter(head, msgspec.json.Encoder().encode_lines, parts.append, clock)
    executor = SimExecutor(replace(cost, buckets=head.buckets), clock, lengths)
    scheduler, pool = build_scheduling(
        head.config, model, head.max_model_len, head.cache, head.budget, _predictor(run, config, arrivals, lengths)
    )
    engine = Engine(executor, scheduler, pool, clock=clock, observer=writer)
    _drive(engine, clock, arrivals, prompts)
    writer.flush()
    return parse_timeline(b"".join(parts))


def _head(run: Timeline, config: EngineConfig) -> TimelineHeader:
    budget = config.max_num_batched_tokens or run.head.budget
    smaller = tuple(bucket for bucket in run.head.buckets if bucket < budget)
    return replace(
        run.head,
        config=replace(config, trace_file=None),
        cache=replace(
            run.head.cache,
            num_pages=config.num_pages or run.head.cache.num_pages,
            page_size=config.page_size or run.head.cache.page_size,
        ),
        budget=budget,
        buckets=(*smaller, budget) if run.head.buckets else (),
    )


def _predictor(
    run: Timeline, config: EngineConfig, arrivals: Sequence[Arrival], lengths: Mapping[str, int]
) -> Predictor | None:
    """Whoever needs to have been there: None where the setting says it all."""
    if config.length_predictor == ORACLE:
        return Oracle(lengths)
    if config.length_predictor in PREDICTORS or config.length_predictor != run.head.config.length_predictor:
        return None
    return Oracle({str(each.n): each.predicted for each in arrivals}, config.length_predictor)


def _drive(engine: Engine, clock: VirtualClock, arrivals: Sequence[Arrival], prompts: Sequence[Sequence[int]]) -> None:
    """Run all requests to their ends."""

    def add(index: int) -> None:
        arrival, now = arrivals[index], clock.now
        clock.now = arrival.at  # it came during the iteration that has just ended, and has been waiting since then
        params = SamplingParams(max_tokens=arrival.max_tokens, temperature=0)
        urgency = Urgency(arrival.priority, str(arrival.tenant or ""), arrival.deadline)
        engine.add(str(arrival.n), prompts[index], params, urgency=urgency)
        clock.now = now

    for _ in feed(engine, [arrival.at for arrival in arrivals], add, clock, partial(advance, clock)):
        pass


def _prompts(run: Timeline, arrivals: Sequence[Arrival]) -> list[list[int]]:
    """Ids that are alike where the recorded pages were."""
    size = run.head.cache.page_size
    numbers: dict[int, int] = {}
    prompts = []
    for arrival in arrivals:
        prompt: list[int] = []
        for page in run.ends[arrival.n].pages:
            prompt += [numbers.setdefault(page, _FIRST_ID + len(numbers))] * size
        prompts.append(prompt)
    first = _FIRST_ID + len(numbers)
    return [
        prompt + [first + index] * (arrival.prompt - len(prompt))
        for index, (arrival, prompt) in enumerate(zip(arrivals, prompts, strict=True))
    ]


def _columns(recorded: Mapping[str, float], replayed: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{recorded[name]:>12,.4g} {replayed[name]:>12,.4g}" for name in recorded}
