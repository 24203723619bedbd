"""Expected times of iterations from a roofline: each part takes the longer of its memory and its arithmetic.

The shares of the peak rates are assumptions, not measurements of this engine. Not included: the time to start programs,
transfers between pipeline stages, the host, and padding.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orca_jax.exec.states import layer_bytes
from orca_jax.model.matrices.quantise import WEIGHT_BYTES
from orca_jax.model.sharding import on_shards, padded_vocab
from orca_jax.sim.cost import WorkCounts, work_of
from orca_jax.tools.plan.accelerators import Accelerator, PeakShares
from orca_jax.tools.plan.memory import Capacity, Demand, StageMemory
from orca_jax.values.config import ModelConfig

ALL_REDUCE_SECONDS = 10e-6  # to start one, assumed
_SUM_BYTES = 4  # of a number in a sum over devices: float32


type WorkByWindow = Mapping[int | None, WorkCounts]
"""The work of an iteration for layers with each window; None: those that see all earlier tokens."""


def even_work(
    windows: Iterable[int | None], requests: int, new: int, before: int, sampled: int
) -> WorkByWindow:
    """The work of equal requests.

    Args:
        windows: of the model's layers.
        requests: their number.
        new: tokens of each in the merged batch.
        before: earlier tokens of each.
        sampled: tokens to draw.
    """
    members = [(before, new, new == 1 and before > 0)] * requests
    return {
        window: work_of(members, sampled, {window: 1})._replace(members=requests)
        for window in windows
    }


class Times(NamedTuple):
    """Expected times of one copy of the model."""

    token_seconds: float  # between two tokens of a request, with all rows running
    tokens_per_second: float  # of all rows
    prompt_seconds: float  # of one prompt alone, up to its first token
    # as `token_seconds`, while new requests with such prompts follow those that end; None: not known
    loaded_seconds: float | None = None


def expected_times(
    model: ModelConfig,
    fit: Capacity,
    kind: Accelerator,
    demand: Demand,
    prompt: int,
    shares: PeakShares,
) -> Times:
    """Times with all rows at the mean context, and of a prompt.

    With several stages as many batches follow each other through the pipeline: the slowest stage sets the pace.
    """
    cost = RooflineCost(model, fit, kind, demand, shares)
    windows = cost.windows
    once = even_work(windows, fit.rows, 1, fit.context - 1, fit.rows)
    interval = fit.split.stages * max(cost.seconds(once))
    length = min(prompt, fit.max_model_len)
    first = sum(cost.seconds(even_work(windows, 1, length, 0, 1)))
    return Times(interval, fit.num_rows / interval, first)


@dataclass(frozen=True)
class RooflineCost:
    """`sim.cost.IterationCost` of a model on accelerators.

    Attributes:
        model: the configuration.
        fit: its stages, and the devices of each.
        kind: the published rates of a device.
        demand: types and lengths.
        shares: shares of the rates that are reached.
    """

    model: ModelConfig
    fit: Capacity
    kind: Accelerator
    demand: Demand
    shares: PeakShares
    host: float = 0.0
    buckets: tuple[int, ...] = ()

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows of the model's layers."""
        layers = on_shards(self.model, self.fit.split.tensor).layer_caches
        return frozenset([layer.window for layer in layers if layer is not None])

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """Seconds of each stage. If layers have several windows, each counts as the mean of all."""
        assert num_stages == len(self.fit.stages), "the stages of another plan"
        return self.seconds(dict.fromkeys(self.windows, work))

    def seconds(self, work: WorkByWindow) -> list[float]:
        """Seconds of each stage."""
        return [self._stage_seconds(stage, work) for stage in self.fit.stages]

    def _stage_seconds(self, stage: StageMemory, work: WorkByWindow) -> float:
        """The time of one stage: products of layers, attention, states, sums over devices, unembedding."""
        model = self.model
        kind = self.kind
        demand = self.demand
        shares = self.shares
        split = self.fit.split
        counts = next(iter(work.values()))  # what does not depend on windows
        bandwidth = kind.bandwidth * shares.bandwidth
        flops = kind.flops * shares.flops
        link = kind.link * shares.link
        span = stage.span
        quantization = demand.quantised(model).quantization
        itemsize: float = np.dtype(demand.dtype).itemsize
        of_tables = itemsize
        if quantization is not None:
            itemsize = WEIGHT_BYTES[quantization]
            of_tables = WEIGHT_BYTES["int8"]
        table = padded_vocab(model, split.tensor) * model.embed_dim * of_tables / split.tensor
        tables = span.is_first + (span.is_last and not (span.is_first and model.tied_embeddings))
        layers = stage.weights - tables * table
        read, active = _used_weights(
            model, layers, span.size * itemsize / split.tensor, counts.num_tokens
        )
        products = max(read / bandwidth, 2 * counts.num_tokens * active / itemsize / flops)
        held = on_shards(model, split.tensor)
        itemsize_of_pages = np.dtype(demand.kv_cache_dtype).itemsize
        scores = 4 * model.num_heads * model.page_shape.head_dim
        attention = 0.0
        for layer in held.layer_caches[span.start : span.stop]:
            if layer is None:
                continue
            slot = layer.shape.token_size * itemsize_of_pages
            of_memory = slot * work[layer.window].num_read / bandwidth
            of_products = scores * work[layer.window].pairs / flops
            attention += max(of_memory, of_products) / split.tensor
        # Each request's state is read and written once. Its products are few beside those of the layer's weights.
        of_states = (
            2
            * counts.members
            * sum(layer_bytes(model, demand.dtype)[span.start : span.stop])
            / split.tensor
        )
        unembedding = 0.0
        if span.is_last:
            unembedding = max(table / bandwidth, 2 * counts.draws * table / of_tables / flops)
        sums = _sums(model, span.size, split.tensor, counts.num_tokens, link)
        return products + attention + of_states / bandwidth + unembedding + sums


def _used_weights(
    model: ModelConfig, layers: float, each: float, tokens: float
) -> tuple[float, float]:
    """Bytes of the layers' weights: those read in an iteration, and those that a token goes through.

    Expected are independent tokens, and experts that are equally probable.

    Args:
        model: the configuration.
        layers: bytes of all weights of the stage's layers on a device.
        each: bytes of the same number in every layer, on a device.
        tokens: the tokens of the iteration.
    """
    experts = model.experts
    if experts is None:
        return layers, layers
    of_experts = each * experts.count * (2 + model.gated_mlp) * model.embed_dim * model.mlp_dim
    of_experts *= len(model.layers_with("mlp")) / model.num_layers
    share = experts.per_token / experts.count
    in_use = 1 - (1 - share) ** tokens
    return layers - of_experts * (1 - in_use), layers - of_experts * (1 - share)


def _sums(model: ModelConfig, layers: int, tensor: int, tokens: float, link: float) -> float:
    """The time of the sums over devices, two in each layer."""
    if tensor == 1:
        return 0.0
    sent = 2 * (tensor - 1) / tensor * tokens * model.embed_dim * _SUM_BYTES
    return 2 * layers * (sent / link + ALL_REDUCE_SECONDS)
