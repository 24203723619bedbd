"""The sensible ways of splitting a model over devices, with memory, times and flags, and the choice of one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orca_jax.assembly.support import Facts, refusal
from orca_jax.config import EngineConfig, ModelConfig
from orca_jax.plan.accelerators import Devices, PeakShares
from orca_jax.plan.memory import Capacity, Demand, Split, fit
from orca_jax.plan.roofline import Times, expected_times


@dataclass(frozen=True)
class Option:
    """One way to use the devices: copies of the model, each split in the same way."""

    memory: Capacity
    replicas: int
    nodes: int  # hosts of one copy
    times: Times | None  # None: the model does not fit, or the peak rates are unknown

    @property
    def fits(self) -> bool:
        """True if the model fits."""
        return not self.memory.shortage

    @property
    def tokens_per_second(self) -> float:
        """Of all copies; 0 if unknown."""
        return self.replicas * self.times.tokens_per_second if self.times else 0.0

    def flags(self) -> list[str]:
        """Return the flags of the server of one copy."""
        split = self.memory.split
        found = ["--tensor-parallel-size", str(split.tensor)]
        if split.stages > 1:
            found += ["--pipeline-parallel-size", str(split.stages)]
        if self.nodes > 1:
            found += ["--nnodes", str(self.nodes)]
        return [*found, "--max-num-seqs", str(self.memory.rows), "--max-model-len", str(self.memory.max_model_len)]


def splits(model: ModelConfig, devices: Devices) -> list[Split]:
    """Return the splits that use all devices with equal copies.

    Tensor parallelism stays within a host of GPUs, and divides heads and MLP evenly; devices may hold copies of
    key/value heads. A CPU has no pipeline.
    """
    kind, number = devices.kind, devices.number
    widest = min(number, kind.per_host) if kind.platform == "gpu" else number
    most_stages = 1 if kind.platform == "cpu" else min(number, model.num_layers)
    facts = Facts(EngineConfig(), model=model, num_devices=number)
    tensors = [n for n in range(1, widest + 1) if number % n == 0 and not refusal(replace(facts, shards=n), "devices")]
    return [
        Split(tensor, stages)
        for tensor in tensors
        for stages in range(1, most_stages + 1)
        if number % (tensor * stages) == 0
    ]


def options(model: ModelConfig, devices: Devices, demand: Demand, prompt: int, shares: PeakShares) -> list[Option]:
    """Return every way to use the devices."""
    return [
        _option(model, devices, split, demand, prompt, shares) for split in splits(demand.quantised(model), devices)
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
    model: ModelConfig, devices: Devices, split: Split, demand: Demand, prompt: int, shares: PeakShares
) -> Option:
    memory = fit(model, split, devices.kind, demand)
    is_timed = not memory.shortage and devices.kind.flops > 0
    times = expected_times(model, memory, devices.kind, demand, prompt, shares) if is_timed else None
    nodes = -(-split.num_devices // devices.kind.per_host)
    return Option(memory, devices.number // split.num_devices, nodes, times)
