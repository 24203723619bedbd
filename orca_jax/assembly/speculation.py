"""Speculation from settings: limits of proposals, a proposer, and the scheduler around another one."""

import logging
import time
from collections.abc import Callable, Mapping

from orca_jax.assembly.settings import overlaps
from orca_jax.config import EngineConfig, SpeculativeConfig
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.drafts.ngram import NgramProposer
from orca_jax.sched.drafts.proposer import Proposer
from orca_jax.sched.drafts.scheduler import DraftLimits, SpeculativeScheduler
from orca_jax.sched.scheduler import KnownScheduler, Scheduler

LARGEST_BATCH = 32
"""Requests of the largest iteration with proposals by default: the sampler needs places for all of them."""

logger = logging.getLogger(__name__)


def largest_batch(config: EngineConfig, speculative: SpeculativeConfig) -> int:
    """The requests of the largest iteration with proposals."""
    return min(config.max_num_seqs, speculative.disable_by_batch_size or LARGEST_BATCH)


def most_drafts(config: EngineConfig) -> int:
    """The most proposed tokens of an iteration."""
    speculative = config.speculative_config
    if speculative is None:
        return 0
    return largest_batch(config, speculative) * speculative.num_speculative_tokens


def speculating(
    config: EngineConfig,
    scheduler: KnownScheduler,
    budget: int,
    launches: Mapping[int, float],
    proposer: Proposer | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Scheduler:
    """A scheduler with proposals added to its selections, and a log line about them; itself without speculation.

    Args:
        config: checked settings.
        scheduler: the scheduler of the settings.
        budget: most tokens of an iteration.
        launches: seconds of a launch of each bucket; empty without a device.
        proposer: the proposer of method "draft_model".
        clock: the clock of the engine.
    """
    speculative = config.speculative_config
    if speculative is None:
        return scheduler
    count, max_bs = speculative.num_speculative_tokens, largest_batch(config, speculative)
    proposer = proposer or NgramProposer(count, *speculative.ngrams)
    limits = DraftLimits(count, max_bs * count, max_bs, config.max_num_seqs, budget)
    charge = scheduler.ordering.charge if isinstance(scheduler, ChunkedScheduler) else None
    way = f"model {speculative.model}"
    if speculative.method == "ngram":
        way = "n-grams of {} to {} tokens".format(*speculative.ngrams)
    logger.info(
        "speculation by %s: at most %d tokens are proposed for a request, in iterations of at most %d requests, while "
        "they pay off",
        way,
        count,
        max_bs,
    )
    return SpeculativeScheduler(
        scheduler, proposer, limits, launches, overlaps=overlaps(config), charge=charge, clock=clock
    )
