"""The sensible ways of splitting a model over devices, with memory, times and flags, and the choice of one."""

from collections.abc import Sequence
from dataclasses import dataclass

from orca_jax.assembly.support import Facts, refusal
from orca_jax.tools.plan.accelerators import Accelerator, Devices, PeakShares
from orca_jax.tools.plan.memory import Capacity, Demand, Split, fit
from orca_jax.tools.plan.roofline import Times, expected_times
from orca_jax.tools.plan.timing import KernelTimes
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import EngineConfig, ModelConfig
from orca_jax.values.platforms import platform_named


@dataclass(frozen=True)
class Option:
    """One way to use the devices: copies of the model, each split in the same way."""

    memory: Capacity
    replicas: int
    nodes: int  # hosts of one copy
    times: Times | None  # None: the model does not fit, or the peak rates are unknown
    is_measured: bool = False  # the times are from measured kernels

    @property
    def fits(self) -> bool:
        """True if the model fits."""
        return not self.memory.shortage

    @property
    def tokens_per_second(self) -> float:
        """Of all copies; 0 if unknown."""
        if self.times:
            return self.replicas * self.times.tokens_per_second
        return 0.0

    def flags(self) -> list[str]:
        """Return the flags of the server of one copy."""
        split = self.memory.split
        found = ["--tensor-parallel-size", str(split.tensor)]
        if split.stages > 1:
            found += ["--pipeline-parallel-size", str(split.stages)]
        if self.nodes > 1:
            found += ["--nnodes", str(self.nodes)]
        return [
            *found,
            "--max-num-seqs",
            str(self.memory.rows),
            "--max-model-len",
            str(self.memory.max_model_len),
        ]


def splits(model: ModelConfig, devices: Devices) -> list[Split]:
    """Return the splits that use all devices with equal copies.

    Tensor parallelism stays within a host of GPUs, and divides heads and MLP evenly; devices may hold copies of
    key/value heads. A CPU has no pipeline. A slice of several hosts has one copy, since its hosts start one program.
    """
    kind = devices.kind
    number = devices.number
    platform = platform_named(kind.platform)
    widest = min(number, kind.per_host) if platform.splits_within_host else number
    most_stages = 1 if platform.is_host else min(number, model.num_layers)
    one_copy = devices.is_slice and kind.num_hosts(number) > 1
    found = []
    for tensor in range(1, widest + 1):
        for stages in range(1, most_stages + 1):
            size = tensor * stages
            is_equal = size == number if one_copy else number % size == 0
            if is_equal and _is_supported(model, kind, tensor, stages):
                found.append(Split(tensor, stages))
    return found


def _is_supported(model: ModelConfig, kind: Accelerator, tensor: int, stages: int) -> bool:
    """Whether the engine takes a copy of this form, on as few hosts as it needs."""
    size = tensor * stages
    num_hosts = kind.num_hosts(size)
    facts = Facts(
        EngineConfig(pipeline_parallel_size=stages),
        num_hosts=num_hosts,
        model=model,
        shards=tensor,
        num_devices=ceil_div(size, num_hosts),
        device_kind=kind.device_kind,
    )
    return refusal(facts, "devices") is None


def options(
    model: ModelConfig,
    devices: Devices,
    demand: Demand,
    prompt: int,
    shares: PeakShares,
    kernels: KernelTimes | None = None,
) -> list[Option]:
    """Return every way to use the devices, with times from kernels where these cover a split."""
    return [
        _option(model, devices, split, demand, prompt, shares, kernels)
        for split in splits(demand.quantised(model), devices)
    ]


def choose(found: Sequence[Option], target_ms: float) -> Option | None:
    """Return the option with the most tokens per second whose tokens of a request are at most `target_ms` apart.

    If none is so fast, the fastest one for a request. Of equal ones, the one with the fewest devices for a copy.
    None: the model fits in no way.
    """
    fitting = [option for option in found if option.fits]
    timed = [(option, option.times) for option in fitting if option.times]
    if not timed:
        return max(fitting, key=lambda option: option.memory.split.tensor, default=None)
    within = [option for option, times in timed if 1e3 * times.token_seconds <= target_ms]
    if not within:
        return min(timed, key=lambda each: each[1].token_seconds)[0]
    return max(within, key=lambda option: (option.tokens_per_second, option.replicas))


def _option(
    model: ModelConfig,
    devices: Devices,
    split: Split,
    demand: Demand,
    prompt: int,
    shares: PeakShares,
    kernels: KernelTimes | None,
) -> Option:
    memory = fit(model, split, devices.kind, demand)
    is_timed = not memory.shortage and devices.kind.flops > 0
    times = measured = None
    if is_timed:
        if kernels is not None:
            measured = kernels.times(model, memory, prompt)
        times = measured or expected_times(model, memory, devices.kind, demand, prompt, shares)
    nodes = devices.kind.num_hosts(split.num_devices)
    replicas = devices.number // split.num_devices
    return Option(memory, replicas, nodes, times, measured is not None)
