"""Scheduler and pool from settings, with ordering, length predictor and speculation, and the head of a timeline."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from orca_jax.assembly.choices import Batches, Choices, Drafts
from orca_jax.assembly.support import check_budget
from orca_jax.helpers.bundled import ranker_directory
from orca_jax.policy.kinds import OUTSIDE, label_of, made_retention, predictor_kind
from orca_jax.sched.adapters import AdapterSlots
from orca_jax.sched.blocks import count_of, most_slots
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.drafts.gain import IterationTimes
from orca_jax.sched.drafts.ngram import NgramProposer
from orca_jax.sched.drafts.proposer import Proposer
from orca_jax.sched.drafts.scheduler import DraftLimits, SpeculativeScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.predict import EnginePredictor, Score, Scored
from orca_jax.sched.prefixes.spans import Retainer
from orca_jax.sched.scheduler import (
    KnownScheduler,
    MeasuredSeconds,
    Scheduler,
    SchedulerSettings,
    unknown_seconds,
)
from orca_jax.timeline.writer import TIMELINE_VERSION, TimelineHeader
from orca_jax.values.checks import is_class_name, load_class
from orca_jax.values.config import PREDICTORS, CacheConfig, EngineConfig, ModelConfig
from orca_jax.values.errors import ConfigError

# share of all pages to keep free when a request is admitted beside others, as in vLLM
WATERMARK = 0.01

RANKER = "orca_jax.tools.ranker.storage"
"""The module that loads trained predictors: a plug-in, imported by its name."""

logger = logging.getLogger(__name__)


def build_scheduling(
    choices: Choices,
    model: ModelConfig,
    max_model_len: int,
    cache: CacheConfig,
    budget: int,
    predictor: EnginePredictor | None = None,
    seconds: MeasuredSeconds = unknown_seconds,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[KnownScheduler, RequestPool]:
    """A scheduler and its pool.

    `budget` is the largest launch in tokens; `predictor` replaces the one of the settings; `seconds` is for policies,
    whose decisions `clock` measures.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    check_budget(choices.budget, budget)
    scheduler = build_scheduler(choices.batches, cache.num_blocks, budget, seconds, clock)
    predictor = predictor or _predictor(choices.requests.predictor, model.vocab_size)
    requests = choices.requests
    traits = choices.traits
    n_slots = choices.requests.n_slots
    if traits.has_reservations and n_slots is None:
        n_slots = max(
            1, most_slots(cache.groups, cache.num_blocks, cache.page_size, requests.num_rows)
        )
    kv = KVManager(
        cache.num_blocks,
        cache.page_size,
        requests.num_rows,
        n_slots,
        groups=cache.groups,
        longest=budget if traits.has_token_budget else None,
        num_drafts=choices.drafts.num_tokens if choices.drafts else 0,
        num_states=cache.num_states,
    )
    pool = RequestPool(
        kv,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model.eos_token_ids,
        reuses_prefixes=requests.reuses_prefixes,
        reuses_in_calls=traits.shares_prefixes,
        predictor=predictor,
        adapters=AdapterSlots(choices.lora.num_slots if choices.lora else 0, requests.most_loras),
        spanless_family=model.family,  # none takes vector spans yet
    )
    retention = made_retention(requests.retention)
    if retention is not None:
        kv.retain(Retainer(retention, cache.page_size, lambda: pool.now))
    return scheduler, pool


def _predictor(name: str, vocab_size: int) -> EnginePredictor:
    if name in PREDICTORS:
        predictor: EnginePredictor = load_class(PREDICTORS[name].place, "length_predictor")()
        return predictor
    if is_class_name(name):
        return predictor_kind(name)
    directory = ranker_directory(name)
    scorer: Score = import_module(RANKER).load_scorer(directory)
    if scorer.vocab_size != vocab_size:
        message = (
            f"length_predictor {name} is for a vocabulary of {scorer.vocab_size} ids, and the model has {vocab_size}; "
            "train another one"
        )
        raise ConfigError(message, param="length_predictor")
    return Scored(scorer)


def build_scheduler(
    batches: Batches,
    num_blocks: Sequence[int],
    budget: int,
    seconds: MeasuredSeconds = unknown_seconds,
    clock: Callable[[], float] = time.perf_counter,
) -> KnownScheduler:
    """The scheduler alone. `num_blocks` are those of each pool, and `budget` is the largest launch in tokens."""
    settings = SchedulerSettings(
        max_bs=batches.max_bs,
        n_workers=batches.n_workers,
        token_budget=budget,
        ordering=batches.ordering,
        num_ahead=batches.num_ahead,
        watermark=count_of([int(WATERMARK * number) for number in num_blocks]),
        num_stages=batches.num_stages,
        num_rows=batches.num_rows,
        seconds=seconds,
        clock=clock,
    )
    return batches.kind.from_settings(settings)


def seconds_of(launches: Mapping[int, float]) -> MeasuredSeconds:
    """Expected seconds of an iteration by its tokens alone, from the seconds of a launch of each bucket."""
    if not launches:
        return unknown_seconds
    times = IterationTimes(launches)
    return lambda members: times.of(sum([size for _, size, _ in members]), waits=False)


def speculating(
    drafts: Drafts | None,
    scheduler: KnownScheduler,
    budget: int,
    launches: Mapping[int, float],
    proposer: Proposer | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Scheduler:
    """A scheduler with proposals added to its selections, and a log line about them; itself without speculation.

    Args:
        drafts: the proposals of the settings.
        scheduler: the scheduler of the settings.
        budget: most tokens of an iteration.
        launches: seconds of a launch of each bucket; empty without a device.
        proposer: the proposer of a draft model.
        clock: the clock of the engine.
    """
    if drafts is None:
        return scheduler
    count = drafts.num_tokens
    max_bs = drafts.max_bs
    proposer = proposer or NgramProposer(count, *drafts.ngrams)
    limits = DraftLimits(count, drafts.most, max_bs, drafts.num_requests, budget)
    charge = scheduler.ordering.charge if isinstance(scheduler, ChunkedScheduler) else None
    way = f"model {drafts.model}"
    if drafts.model is None:
        way = "n-grams of {} to {} tokens".format(*drafts.ngrams)
    logger.info(
        "speculation by %s: at most %d tokens are proposed for a request, in iterations of at most %d requests, while "
        "they pay off",
        way,
        count,
        max_bs,
    )
    return SpeculativeScheduler(
        scheduler, proposer, limits, launches, overlaps=drafts.overlaps, charge=charge, clock=clock
    )


def timeline_header(
    config: EngineConfig,
    cache: CacheConfig,
    max_model_len: int,
    budget: int,
    buckets: tuple[int, ...] = (),
) -> TimelineHeader:
    """Return the first line of a timeline: the settings, and what they came to."""
    offset = time.time() - time.monotonic()
    labels: dict[str, Any] = {name: label_of(getattr(config, name), name) for name in OUTSIDE}
    config = replace(config, **labels)
    return TimelineHeader(TIMELINE_VERSION, config, cache, max_model_len, budget, buckets, offset)
