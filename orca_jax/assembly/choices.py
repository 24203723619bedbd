"""The choices of settings as small values for others to read, and the refusal of numbers out of range."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from orca_jax.policy.kinds import PolicyKind, order_kind, policy_kind, reads_of_retention
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.scheduler import SchedulerKind
from orca_jax.sim.clock import CLOCK_PREFIX
from orca_jax.values.checks import is_class_name, load_class
from orca_jax.values.config import (
    GPU_MEMORY_UTILIZATION,
    KV_DISK_GIB,
    LRU,
    MAX_LORA_RANK,
    MAX_LORAS,
    ORDERINGS,
    SCHEDULERS,
    EngineConfig,
    KVCacheDType,
    LogprobsMode,
    LoraConfig,
    Traits,
)
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_named

logger = logging.getLogger(__name__)

TOY = "preset:toy"
# tokens; the fastest size measured on a CPU, and large enough to keep page tables short
PAGE_SIZE = 128
TOY_PAGE_SIZE = 16
LARGEST_DRAFTED = 32
"""Requests of the largest iteration with proposals by default: the sampler needs places for all of them."""
MAX_AHEAD = 256  # iterations; with more of them a new request waits for seconds on most devices

# The p99 time between tokens at 0.9 of saturation, relative to a measured launch, which has a full batch: 0.76 to 0.84
# for GPT-2 in two types with budgets of 128 and 512 (docs/benchmarks.md).
_SHARE_OF_LAUNCH = 0.85

_AT_LEAST_ONE = (
    "max_num_seqs", "n_workers", "max_model_len", "n_slots", "tensor_parallel_size", "pipeline_parallel_size",
    "page_size", "num_pages", "max_num_batched_tokens", "max_loras", "max_lora_rank", "max_cpu_loras",
    "check_in_interval", "max_num_rows", "kv_host_memory", "kv_disk_size",
)  # fmt: skip
MOST_PAGES = 2**22  # each takes memory of the host
MOST_ROWS = 2**16
_AT_MOST = {"num_pages": MOST_PAGES, "max_num_seqs": MOST_ROWS, "max_num_rows": MOST_ROWS}


@dataclass(frozen=True)
class Batches:
    """The selection of requests for iterations."""

    kind: SchedulerKind
    ordering: type[Ordering]
    max_bs: int  # requests of an iteration
    n_workers: int  # batches that take turns: by default one for each pipeline stage
    # batches of a pipeline: more of them than stages count as stages; 1 without a pipeline
    num_stages: int
    # iterations submitted before the results of an earlier one are read; 0 without overlap
    num_ahead: int
    num_rows: int = 0  # requests with a row, for a policy from outside; 0: those of the iterations
    read_by_retention: frozenset[str] = frozenset()

    @property
    def reads(self) -> frozenset[str]:
        """The fields of callers and predictors that scheduler, ordering and retention may read."""
        return self._read_by_scheduler | self.read_by_retention

    @property
    def needs(self) -> frozenset[str]:
        """The fields that scheduler and ordering say they read."""
        if isinstance(self.kind, PolicyKind):
            return self.kind.needs
        return self._read_by_scheduler

    @property
    def _read_by_scheduler(self) -> frozenset[str]:
        traits = self.kind.traits
        return traits.reads | self.ordering.reads if traits.has_orderings else traits.reads


@dataclass(frozen=True)
class Requests:
    """The requests in the pool, and what they share."""

    num_rows: int  # requests with rows
    # tokens that may be reserved at once; None: as many as fit, or no reservations
    n_slots: int | None
    reuses_prefixes: bool
    predictor: str
    most_loras: int  # adapters that may be loaded at once
    retention: str = LRU
    logprobs_mode: LogprobsMode = "raw_logprobs"


@dataclass(frozen=True)
class Budget:
    """The tokens of launches, as far as the settings decide about them."""

    wanted: int | None  # tokens of one launch; None: the default of the platform, or by measurement
    max_num_seqs: int
    has_token_budget: bool = True  # an iteration has at most as many tokens
    itl_target_ms: float | None = None  # None: the default of the platform

    @property
    def _is_measured(self) -> bool:
        return self.wanted is None and self.has_token_budget

    def largest(self, platform: str) -> int:
        """Return the most tokens of one launch: those of the settings, or the default of the platform."""
        if self.wanted is not None:
            return self.wanted
        largest = platform_named(platform).largest_launch
        return max(largest, self._least(platform)) if self.has_token_budget else largest

    def _least(self, platform: str) -> int:
        """Return the smallest default. It leaves half of itself to prompts if the batch is full."""
        return max(platform_named(platform).least_launch, 2 * self.max_num_seqs)

    def sizes(self, platform: str, *, skips_padding: bool = False) -> tuple[int, ...]:
        """Return the padded token counts of launches, with few candidates for a CPU: each is compiled."""
        from orca_jax.exec.buckets import default_buckets

        largest = self.largest(platform)
        if skips_padding or not self._is_measured or not platform_named(platform).doubles_launches:
            return default_buckets(largest, skips_padding=skips_padding)
        least = self._least(platform)
        doubled = [least]
        while 2 * doubled[-1] <= largest:
            doubled.append(2 * doubled[-1])
        return (*default_buckets(least)[:-1], *doubled)

    def is_enough(self, platform: str, size: int, seconds: float) -> bool:
        """Return True if larger launches need no measurement, since this one takes longer than the target."""
        is_candidate = self._is_measured and size >= self._least(platform)
        return is_candidate and _SHARE_OF_LAUNCH * 1e3 * seconds > self._target_ms(platform)

    def _target_ms(self, platform: str) -> float:
        return self.itl_target_ms or platform_named(platform).itl_target_ms

    def tokens(self, platform: str, seconds: Mapping[int, float]) -> int:
        """Return the most tokens of an iteration, and log the choice.

        Args:
            platform: the platform of the devices.
            seconds: measured time of a launch of each size, up to one for which `is_enough`.
        """
        largest = max(seconds)
        if not self._is_measured:
            return min(self.largest(platform), largest)
        least = min(self._least(platform), largest)
        target = self._target_ms(platform)
        candidates = {size: 1e3 * taken for size, taken in seconds.items() if size >= least}
        within = [size for size, taken in candidates.items() if _SHARE_OF_LAUNCH * taken <= target]
        budget = max(within, default=min(candidates))
        logger.info(
            "token budget %d: launches of %s tokens take %s ms, and %.0f ms between tokens are the target",
            budget,
            ", ".join(map(str, candidates)),
            ", ".join(str(round(taken)) for taken in candidates.values()),
            target,
        )
        return budget


@dataclass(frozen=True)
class Drafts:
    """The proposals of speculation."""

    num_tokens: int  # proposed for one request in an iteration
    max_bs: int  # requests of the largest iteration with proposals
    num_requests: int  # of the largest iteration
    overlaps: bool
    ngrams: tuple[int, int]  # the shortest and the longest
    model: str | None  # None: proposals from n-grams

    @property
    def most(self) -> int:
        """The most proposed tokens of an iteration."""
        return self.max_bs * self.num_tokens


@dataclass(frozen=True)
class DeviceChoices:
    """The devices wanted for a model."""

    tensor: int | None = None  # of a stage; None: as many as suit the platform
    stages: int = 1
    utilization: float = GPU_MEMORY_UTILIZATION  # share of the memory of an accelerator
    needs_memory: bool = True  # the free memory decides about the KV cache


@dataclass(frozen=True)
class TierChoices:
    """The memory outside of the devices for pages of prefixes."""

    host_memory: int | None = None  # bytes; None: no pages in the memory of the host
    disk: str | None = None  # a directory; None: no pages in files
    disk_size: int = KV_DISK_GIB * 2**30  # bytes

    @property
    def are_used(self) -> bool:
        """True if pages are kept outside of the devices."""
        return self.host_memory is not None or self.disk is not None


@dataclass(frozen=True)
class PageChoices:
    """The pages of the KV cache."""

    size: int = PAGE_SIZE  # tokens
    number: int | None = None  # None: as many as fit
    dtype: KVCacheDType | Literal["auto"] = "auto"
    tiers: TierChoices = TierChoices()


@dataclass(frozen=True)
class Choices:
    """All choices of the settings of an engine, made before its model and its devices are known."""

    is_toy: bool
    batches: Batches
    requests: Requests
    budget: Budget
    drafts: Drafts | None
    devices: DeviceChoices
    pages: PageChoices
    lora: LoraConfig | None

    @property
    def traits(self) -> Traits:
        """The traits of the scheduler."""
        return self.batches.kind.traits

    @property
    def most_drafts(self) -> int:
        """The most proposed tokens of an iteration."""
        return 0 if self.drafts is None else self.drafts.most


def choices_of(config: EngineConfig) -> Choices:
    """Return the choices of settings, which need not be checked. Raises ConfigError for an unknown order or class."""
    kind, ordering = _kinds(config.scheduler, config.scheduler_options, config.scheduling_policy)
    traits = kind.traits
    is_for_toy = is_toy(config.model)
    stages = config.pipeline_parallel_size
    n_workers = config.n_workers or stages
    speculative = config.speculative_config
    # A pipeline has iterations of other requests in flight instead.
    overlaps = traits.has_overlap and config.overlap is not False and stages == 1
    num_loras = (config.max_loras or MAX_LORAS) if config.enable_lora else 0
    return Choices(
        is_toy=is_for_toy,
        batches=Batches(
            kind,
            ordering,
            config.max_num_seqs,
            n_workers,
            # The token of a request is always known when it is selected again.
            num_stages=n_workers if stages > 1 else 1,
            num_ahead=config.check_in_interval if overlaps else 0,
            num_rows=config.max_num_rows or 0,
            read_by_retention=reads_of_retention(config.retention),
        ),
        requests=Requests(
            config.max_num_rows or config.max_num_seqs * n_workers,
            config.n_slots,
            reuses_prefixes=traits.shares_prefixes and config.enable_prefix_caching is not False,
            predictor=config.length_predictor or "bound",
            most_loras=config.max_cpu_loras or 4 * num_loras,
            retention=config.retention,
            logprobs_mode=config.logprobs_mode,
        ),
        budget=Budget(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            traits.has_token_budget,
            config.itl_target_ms,
        ),
        drafts=None
        if speculative is None
        else Drafts(
            speculative.num_speculative_tokens,
            min(config.max_num_seqs, speculative.disable_by_batch_size or LARGEST_DRAFTED),
            config.max_num_seqs,
            overlaps,
            speculative.ngrams,
            speculative.model,
        ),
        devices=DeviceChoices(
            config.tensor_parallel_size,
            stages,
            config.gpu_memory_utilization or GPU_MEMORY_UTILIZATION,
            needs_memory=config.num_pages is None,
        ),
        pages=PageChoices(
            config.page_size or (TOY_PAGE_SIZE if is_for_toy else PAGE_SIZE),
            config.num_pages,
            config.kv_cache_dtype,
            tiers=TierChoices(
                config.kv_host_memory,
                config.kv_disk,
                config.kv_disk_size or KV_DISK_GIB * 2**30,
            ),
        ),
        lora=LoraConfig(num_loras, config.max_lora_rank or MAX_LORA_RANK) if num_loras else None,
    )


def _kinds(
    scheduler: str, options: str | None, policy: str
) -> tuple[SchedulerKind, type[Ordering]]:
    """The kind of scheduler, and its ordering; an order from outside comes with a scheduler. Raises ConfigError."""
    is_outside = is_class_name(scheduler)
    kind = policy_kind(scheduler, options) if is_outside else scheduler_kind(scheduler)
    if not is_class_name(policy):
        return kind, ordering_kind(policy)
    return order_kind(policy) if kind is ChunkedScheduler else kind, FirstComeFirstServed


def scheduler_kind(name: str) -> SchedulerKind:
    """Return the scheduler of a name in `SCHEDULERS`."""
    found: Any = load_class(SCHEDULERS[name].place, "scheduler")
    kind: SchedulerKind = found
    return kind


def ordering_kind(name: str) -> type[Ordering]:
    """Return the order of a name in `ORDERINGS`."""
    return load_class(ORDERINGS[name].place, "scheduling_policy")


def check_numbers(config: EngineConfig) -> None:
    """Refuse numbers out of range.

    Raises:
        ConfigError: `param` names the setting.
    """
    for name in _AT_LEAST_ONE:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
    for name, most in _AT_MOST.items():
        value = getattr(config, name)
        if value is not None and value > most:
            raise ConfigError(f"{name} must be at most {most}, got {value}", param=name)
    if config.check_in_interval > MAX_AHEAD:
        message = f"check_in_interval must be at most {MAX_AHEAD}, got {config.check_in_interval}"
        raise ConfigError(message, param="check_in_interval")
    target = config.itl_target_ms
    if target is not None and not 0 < target < inf:
        raise ConfigError(
            f"itl_target_ms must be a positive number of milliseconds, got {target}",
            param="itl_target_ms",
        )
    share = config.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise ConfigError(
            f"gpu_memory_utilization must be in (0, 1], got {share}", param="gpu_memory_utilization"
        )


def is_toy(model: str) -> bool:
    """Return True for the toy model and its clocks."""
    return model == TOY or model.startswith(CLOCK_PREFIX)
