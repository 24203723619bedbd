"""Run the recorded arrivals under a scheduler again, on a virtual clock.

The cost of an iteration is fitted to the recorded iterations: it is linear in the tokens, padding included, and in the
pairs of tokens in attention. Flags that are left out keep the recorded settings. The length predictor may also be
"oracle", which takes the lengths from the file.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.support import adapted, check_settings
from orca_jax.flags import add_setting_args
from orca_jax.helpers.processor import cpu_name
from orca_jax.helpers.reporting import print_table, print_warning
from orca_jax.sched.drafts.proposer import Chance, Wish
from orca_jax.sched.predict import EnginePredictor, Oracle
from orca_jax.sched.request import Request
from orca_jax.sim.cost import IterationCost
from orca_jax.sim.executor import OTHER_ID
from orca_jax.timeline.measure import (
    Timeline,
    figures,
    proposals,
    shown_figures,
    side_by_side,
    timeline_of,
)
from orca_jax.timeline.read import load_timeline
from orca_jax.timeline.writer import Arrival, TimelineHeader
from orca_jax.tools.bench.virtual import FIRST_ID, SimulatedRequest, VirtualDevice, run_virtually
from orca_jax.tools.timeline.fit import fit_cost
from orca_jax.tools.timeline.flags import add_file_args
from orca_jax.tools.timeline.views import write_views
from orca_jax.values.config import PREDICTORS, EngineConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import Urgency

ORACLE = "oracle"
"""A length predictor of replays only."""


_FLAGS = (
    "scheduler", "scheduling_policy", "length_predictor", "max_num_seqs", "max_num_batched_tokens", "overlap",
    "check_in_interval", "speculative_config", "enable_prefix_caching", "n_workers", "n_slots", "num_pages",
)  # fmt: skip


class ReplaceableCost(IterationCost, Protocol):
    """A cost as a dataclass; the replay replaces its buckets."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class SimProposer:
    """Proposes for every request at any time. The ids have no meaning; the executor decides about their acceptance.

    Args:
        count: ids of a proposal.
        acceptance: that of the executor; the scheduler knows it from the beginning.
    """

    seconds = 0.0

    def __init__(self, count: int, acceptance: float) -> None:
        self._count = count
        self._chance = Chance(1.0, acceptance)

    def chance(self, request: Request) -> Chance:
        """The same for all requests."""
        return self._chance

    def ready(self, request: Request) -> int:
        """All ids of a proposal."""
        return self._count

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """The id drawn by requests that go on."""
        return [[OTHER_ID] * wish.number for wish in wishes]

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Does nothing: the chance is known."""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the files, and of the settings that a replay can change."""
    add_file_args(parser)
    add_setting_args(parser, _FLAGS)


def run(args: argparse.Namespace) -> None:
    """Replay a file; print recorded and replayed figures side by side, and a line of JSON.

    Raises:
        ConfigError: the file or a setting is wrong.
    """
    recording = load_timeline(args.file)
    fit = fit_cost(recording)
    changes = {name: getattr(args, name) for name in _FLAGS if hasattr(args, name)}
    # Of the recorded settings, the other scheduler may have no use for some.
    again = replay(recording, adapted(replace(recording.head.config, **changes), changes), fit.cost)
    recorded = figures(recording)
    replayed = figures(again)
    fitted = fit.shown
    print_table("fitted cost in seconds", fitted)
    print_table(
        f"{'recorded, then replayed with':<28} {changes or 'nothing changed'}",
        side_by_side(shown_figures(recording), shown_figures(again)),
    )
    print_warning(fit.warning)
    line = {
        "recorded": recorded,
        "replayed": replayed,
        "fit": {**fitted, "warning": fit.warning},
        "config": dataclasses.asdict(again.head.config),
        "trace": args.file,
        # of the replay; its figures do not depend on it
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count()},
    }
    print(json.dumps(line))
    write_views(again, args)


def replay(timeline: Timeline, config: EngineConfig, cost: ReplaceableCost) -> Timeline:
    """Simulate a recorded timeline under `config`.

    Every request arrives at its recorded time, and generates its recorded number of tokens. Requests without an end in
    the timeline, or with an end before their first token, are left out. If the recorded engine had prefix caching,
    prompts share the same pages as then; otherwise no two prompts are alike.

    A length predictor that learns while serving learns again; of other predictors, the recorded predictions are used.
    The predictor "oracle" returns the recorded lengths.

    Raises:
        ConfigError: a setting is wrong, or no request is left.
    """
    if not timeline.iterations:
        raise ConfigError(
            "the timeline has no iterations, so there is nothing to replay", param="trace"
        )
    arrivals = [
        each
        for each in timeline.arrivals.values()
        if each.n in timeline.ends and timeline.ends[each.n].generated
    ]
    if not arrivals:
        raise ConfigError(
            "no request of the timeline has a token, so there is nothing to replay", param="trace"
        )
    requests = [
        SimulatedRequest(
            each.at,
            prompt,
            timeline.ends[each.n].generated,
            each.max_tokens,
            Urgency(each.priority, str(each.tenant or ""), each.deadline),
        )
        for each, prompt in zip(arrivals, _prompts(timeline, arrivals), strict=True)
    ]
    head = _head(timeline, config)
    acceptance = _acceptance(timeline, config)
    speculative = config.speculative_config
    device = VirtualDevice(
        replace(cost, buckets=head.buckets),
        _predictor(timeline, config, arrivals),
        None
        if speculative is None
        else SimProposer(speculative.num_speculative_tokens, acceptance),
        acceptance,
        # Requests that arrived before the first recorded iteration are added before anything runs.
        start=max(arrivals[0].at, timeline.iterations[0].selected),
    )
    return timeline_of(run_virtually(requests, head, check_settings(head.config), device))


def _head(timeline: Timeline, config: EngineConfig) -> TimelineHeader:
    cache = timeline.head.cache
    num_blocks = timeline.head.cache.num_blocks
    if config.num_pages is not None:
        num_blocks = (config.num_pages,)
        if len(cache.num_blocks) > 1:
            from orca_jax.exec.cache import with_num_pages  # most replays need no JAX

            num_blocks = with_num_pages(
                cache, config.num_pages, timeline.head.max_model_len
            ).num_blocks
    budget = config.max_num_batched_tokens or timeline.head.budget
    smaller = tuple(bucket for bucket in timeline.head.buckets if bucket < budget)
    return replace(
        timeline.head,
        config=replace(config, trace_file=None),
        cache=replace(
            cache,
            num_blocks=num_blocks,
            page_size=config.page_size or cache.page_size,
            num_states=cache.num_states
            and max(cache.num_states, 2 * choices_of(config).requests.num_rows),
        ),
        budget=budget,
        buckets=(*smaller, budget) if timeline.head.buckets else (),
    )


def _acceptance(timeline: Timeline, config: EngineConfig) -> float:
    """Return the recorded chance of a proposed token to be accepted, if all before it were."""
    if config.speculative_config is None:
        return 1.0
    _, accepted, tested = proposals(timeline)
    if not tested:
        message = "the timeline has no proposals, so their acceptance is not known; record one with speculative_config"
        raise ConfigError(message, param="speculative_config")
    return accepted / tested


def _predictor(
    timeline: Timeline, config: EngineConfig, arrivals: Sequence[Arrival]
) -> EnginePredictor | None:
    """Return a predictor with recorded values, or None if `config` is enough to build one."""
    name = config.length_predictor
    if name == ORACLE:
        return Oracle(
            {str(index): timeline.ends[each.n].generated for index, each in enumerate(arrivals)}
        )
    if name is None or name in PREDICTORS or name != timeline.head.config.length_predictor:
        return None
    return Oracle({str(index): each.predicted for index, each in enumerate(arrivals)})


def _prompts(timeline: Timeline, arrivals: Sequence[Arrival]) -> list[list[int]]:
    """Make prompts with equal ids in the pages recorded as equal; other pages have no common beginning."""
    size = timeline.head.cache.page_size
    numbers: dict[int, int] = {}
    prompts = []
    for arrival in arrivals:
        prompt: list[int] = []
        for page in timeline.ends[arrival.n].pages:
            number = numbers.setdefault(page, FIRST_ID + len(numbers))
            prompt += [number] * min(size, arrival.prompt - len(prompt))
        prompts.append(prompt)
    first = FIRST_ID + len(numbers)
    return [
        prompt + [first + index] * (arrival.prompt - len(prompt))
        for index, (arrival, prompt) in enumerate(zip(arrivals, prompts, strict=True))
    ]
