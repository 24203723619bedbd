"""The token budget: the largest launch within a target for the time between tokens."""

import logging
from collections.abc import Mapping, Sequence

from orca_jax.assembly.settings import traits_of
from orca_jax.config import EngineConfig

logger = logging.getLogger(__name__)

_LARGEST = {"cpu": 512}  # tokens of a launch: the size at which a matrix product on a CPU reaches full speed
_LARGEST_OF_ACCELERATORS = 2048
_LEAST = {"cpu": 128}  # tokens of the smallest budget by default: four fifths of full speed on a CPU without AMX
_LEAST_OF_ACCELERATORS = 512
_ITL_TARGET_MS = {"cpu": 250.0}  # four tokens a second, the speed of reading
_ITL_TARGET_MS_OF_ACCELERATORS = 100.0
# The p99 time between tokens at 0.9 of saturation, relative to a measured launch, which has a full batch: 0.76 to 0.84
# for GPT-2 in two types with budgets of 128 and 512 (docs/benchmarks.md).
_SHARE_OF_LAUNCH = 0.85


def largest_launch(config: EngineConfig, platform: str) -> int:
    """Return the most tokens of one launch: those of the settings, or the default of the platform."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    largest = _LARGEST.get(platform, _LARGEST_OF_ACCELERATORS)
    return max(largest, least_budget(config, platform)) if traits_of(config).has_token_budget else largest


def least_budget(config: EngineConfig, platform: str) -> int:
    """Return the smallest default budget. It leaves half of itself to prompts if the batch is full."""
    return max(_LEAST.get(platform, _LEAST_OF_ACCELERATORS), 2 * config.max_num_seqs)


def launch_sizes(config: EngineConfig, platform: str) -> tuple[int, ...]:
    """Return the padded token counts of launches, with few candidates for the budget of a CPU: each is compiled."""
    from orca_jax.exec.buckets import default_buckets

    largest = largest_launch(config, platform)
    if not _is_measured(config) or platform != "cpu":
        return default_buckets(largest)
    least = least_budget(config, platform)
    doubled = [least]
    while 2 * doubled[-1] <= largest:
        doubled.append(2 * doubled[-1])
    return (*default_buckets(least)[:-1], *doubled)


def token_budget(config: EngineConfig, platform: str, seconds: Mapping[int, float]) -> int:
    """Return the most tokens of an iteration, and log the choice.

    Args:
        config: the settings.
        platform: the platform of the devices.
        seconds: measured time of a launch of each size.
    """
    largest = max(seconds)
    if not _is_measured(config):
        return min(largest_launch(config, platform), largest)
    least = min(least_budget(config, platform), largest)
    target = config.itl_target_ms or _ITL_TARGET_MS.get(platform, _ITL_TARGET_MS_OF_ACCELERATORS)
    candidates = {size: 1e3 * taken for size, taken in seconds.items() if size >= least}
    within = [size for size, taken in candidates.items() if _SHARE_OF_LAUNCH * taken <= target]
    budget = max(within, default=min(candidates))
    logger.info(
        "token budget %d: launches of %s tokens take %s ms, and %.0f ms between tokens are the target",
        budget,
        _listed(list(candidates)),
        _listed([round(taken) for taken in candidates.values()]),
        target,
    )
    return budget


def _is_measured(config: EngineConfig) -> bool:
    """Return True if the budget follows from measurements."""
    return config.max_num_batched_tokens is None and traits_of(config).has_token_budget


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
