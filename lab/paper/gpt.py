"""The models of the paper's evaluation (section 6, Table 1): memory and cost from arithmetic, in 16-bit numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from orca_jax.sim.cost import IterationCost, WorkCounts

VOCABULARY = 50_257  # of GPT-2 and GPT-3
LONGEST = 2048  # tokens of a request, preallocated by FasterTransformer (section 6.2)
BYTES = 2  # of a number
LONGEST_PROMPT = 512  # of the paper's workload
USABLE = 0.9
"""The share of a device's memory for weights, keys and values and activations; the rest is the runtime's."""


class Device(Protocol):
    """The published rates of a device, as in `tools/plan/accelerators.py`."""

    @property
    def memory(self) -> float:
        """Bytes of its memory."""
        ...

    @property
    def bandwidth(self) -> float:
        """Bytes per second of its memory."""
        ...

    @property
    def flops(self) -> float:
        """Operations per second on 16-bit numbers, without sparsity."""
        ...


class EngineCost(IterationCost, Protocol):
    """The cost of a stage with an engine."""

    def filled(self, work: WorkCounts, places: int, num_stages: int) -> Sequence[float]:
        """Seconds on each stage, if a batch has all its places taken by members like its own."""
        ...


class Efficiency(NamedTuple):
    """The shares of the published rates that an engine reaches with one model."""

    memory: float  # of the bandwidth, while weights, keys and values are read
    compute: float  # of the operations, in products of matrices


@dataclass(frozen=True)
class StageCost:
    """A cost for each stage of a pipeline, from the bytes and operations of its layers.

    Reading the weights and computing the tokens of prompts add up, as measured on the paper's hardware. A chunk
    behind others reads the keys and values before it, as an increment does.
    """

    weights: float  # seconds of a stage to read its weights, for each step
    initiation: float  # seconds of a stage for each token of a chunk
    increment: float  # seconds of a stage for each increment
    context: float  # seconds of a stage for each token with keys and values to read
    # seconds of a stage without work, while its worker synchronises to pass the plan on
    control: float = 0.0
    # seconds of a stage for each request, as its attention is not batched with others'
    request: float = 0.0
    host: float = 0.0
    buckets: tuple[int, ...] = ()

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """The same seconds on each stage, since all have as many layers."""
        seconds = (self.weights + self.control) * work.steps + self.initiation * work.chunk_tokens
        seconds += self.request * work.members
        seconds += self.increment * work.increments + self.context * (
            work.context + work.chunk_context
        )
        return [seconds] * num_stages

    def filled(self, work: WorkCounts, places: int, num_stages: int) -> Sequence[float]:
        """The same seconds on each stage; those beside the weights grow with the empty places."""
        (seconds, *_) = self.stages(work, 1)
        fixed = (self.weights + self.control) * work.steps
        return [fixed + (seconds - fixed) * places / work.members] * num_stages

    def slower(self, factor: float) -> "StageCost":
        """The cost of an engine with this multiple of the seconds."""
        return replace(
            self,
            weights=factor * self.weights,
            initiation=factor * self.initiation,
            increment=factor * self.increment,
            context=factor * self.context,
        )


class GPT(NamedTuple):
    """A GPT on `num_stages` pipeline stages of `num_tensor` devices each.

    A layer has 12 H^2 weights: 4 H^2 in attention and 8 H^2 in the MLP. A token costs two operations for each weight.
    """

    num_layers: int
    hidden: int  # H
    num_stages: int  # the paper's inter-layer parallelism
    num_tensor: int  # the paper's intra-layer parallelism

    @property
    def num_devices(self) -> int:
        """The number of devices of the model."""
        return self.num_stages * self.num_tensor

    @property
    def layer_bytes(self) -> float:
        """Bytes of the layers' weights on a device: read once for each iteration."""
        return 12 * self.num_layers * self.hidden**2 * BYTES / self.num_devices

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on a device of the first stage, which has the embeddings."""
        return self.layer_bytes + VOCABULARY * self.hidden * BYTES / self.num_tensor

    @property
    def slot_bytes(self) -> float:
        """Bytes of one token's keys and values on a device."""
        return 2 * self.num_layers * self.hidden * BYTES / self.num_devices

    @property
    def activation_bytes(self) -> float:
        """Bytes of one token's vectors in a layer on a device: 3H, H and 4H numbers by devices, and two whole H."""
        return (8 * self.hidden / self.num_tensor + 2 * self.hidden) * BYTES

    def num_slots(self, device: Device) -> int:
        """The largest `n_slots`: the usable memory beside the weights."""
        return int((USABLE * device.memory - self.weight_bytes) / self.slot_bytes)

    def most_preallocated(self, device: Device) -> int:
        """The largest batch of FasterTransformer: keys and values of 2,048 tokens for each request, and activations."""
        each = LONGEST * self.slot_bytes + LONGEST_PROMPT * self.activation_bytes
        return int((USABLE * device.memory - self.weight_bytes) / each)

    def cost(self, device: Device, efficiency: Efficiency) -> StageCost:
        """The cost of a stage."""
        bandwidth = efficiency.memory * device.bandwidth
        flops = efficiency.compute * device.flops
        per_token = self.layer_bytes / flops  # two operations and two bytes for each weight
        return StageCost(
            self.layer_bytes / bandwidth, per_token, per_token, self.slot_bytes / bandwidth
        )


MODELS: dict[str, GPT] = {
    "13B": GPT(40, 5120, 1, 1),
    "101B": GPT(80, 10240, 1, 8),
    "175B": GPT(96, 12288, 2, 8),
    "341B": GPT(120, 15360, 4, 8),
}
