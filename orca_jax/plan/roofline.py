"""Expected times of iterations from a roofline: each part takes the longer of its memory and its arithmetic.

The shares of the peak rates are assumptions, not measurements of this engine. Not included: the time to start programs,
transfers between pipeline stages, the host, and padding.
"""

from typing import NamedTuple

import numpy as np

from orca_jax.cache_spec import attended_pairs
from orca_jax.config import ModelConfig
from orca_jax.exec.states import layer_bytes
from orca_jax.model.quantise import WEIGHT_BYTES
from orca_jax.model.sharding import on_shards, padded_vocab
from orca_jax.plan.accelerators import Accelerator, PeakShares
from orca_jax.plan.memory import Capacity, Demand, Split, StageMemory

ALL_REDUCE_SECONDS = 10e-6  # to start one, assumed
_SUM_BYTES = 4  # of a number in a sum over devices: float32


class IterationWork(NamedTuple):
    """The work of an iteration: requests with as many new tokens each, after as many earlier ones."""

    requests: int
    new: int  # tokens of each in the merged batch
    before: int  # tokens of each
    sampled: int  # tokens to draw

    @property
    def tokens(self) -> int:
        """Tokens of the merged batch."""
        return self.requests * self.new

    def read(self, window: int | None) -> int:
        """Tokens whose keys and values are read in a layer."""
        context = self.before + self.new
        return self.requests * (context if window is None else min(context, window + self.new - 1))

    def pairs(self, window: int | None) -> int:
        """Pairs of a token and an attended one in a layer."""
        return self.requests * attended_pairs(self.before, self.new, window)


class Times(NamedTuple):
    """Expected times of one copy of the model."""

    token_seconds: float  # between two tokens of a request, with all rows running
    tokens_per_second: float  # of all rows
    prompt_seconds: float  # of one prompt alone, up to its first token


def expected_times(
    model: ModelConfig, fit: Capacity, kind: Accelerator, demand: Demand, prompt: int, shares: PeakShares
) -> Times:
    """Times with all rows at the mean context, and of a prompt.

    With several stages as many batches follow each other through the pipeline: the slowest stage sets the pace.
    """

    def seconds(work: IterationWork) -> list[float]:
        return [stage_seconds(model, stage, fit.split, kind, demand, work, shares) for stage in fit.stages]

    once = IterationWork(fit.rows, 1, fit.context - 1, fit.rows)
    interval = fit.split.stages * max(seconds(once))
    length = min(prompt, fit.max_model_len)
    first = sum(seconds(IterationWork(1, length, 0, 1)))
    return Times(interval, fit.num_rows / interval, first)


def stage_seconds(
    model: ModelConfig,
    stage: StageMemory,
    split: Split,
    kind: Accelerator,
    demand: Demand,
    work: IterationWork,
    shares: PeakShares,
) -> float:
    """The time of one stage for an iteration: products of layers, attention, states, sums over devices, unembedding."""
    bandwidth, flops, link = (
        kind.bandwidth * shares.bandwidth,
        kind.flops * shares.flops,
        kind.link * shares.link,
    )
    span, quantization = stage.span, demand.quantised(model).quantization
    plain = np.dtype(demand.dtype).itemsize
    itemsize, of_tables = (plain, plain) if quantization is None else (WEIGHT_BYTES[quantization], WEIGHT_BYTES["int8"])
    table = padded_vocab(model, split.tensor) * model.embed_dim * of_tables / split.tensor
    tables = span.is_first + (span.is_last and not (span.is_first and model.tied_embeddings))
    layers = stage.weights - tables * table
    read, active = _used_weights(model, layers, span.size * itemsize / split.tensor, work.tokens)
    products = max(read / bandwidth, 2 * work.tokens * active / itemsize / flops)
    held, itemsize_of_pages = on_shards(model, split.tensor), np.dtype(demand.kv_cache_dtype).itemsize
    scores = 4 * model.num_heads * model.page_shape.head_dim
    attention = 0.0
    for layer in held.layer_caches[span.start : span.stop]:
        if layer is None:
            continue
        slot = layer.shape.token_size * itemsize_of_pages
        of_memory, of_products = slot * work.read(layer.window) / bandwidth, scores * work.pairs(layer.window) / flops
        attention += max(of_memory, of_products) / split.tensor
    # Each request's state is read and written once. Its products are few beside those of the layer's weights.
    of_states = 2 * work.requests * sum(layer_bytes(model, demand.dtype)[span.start : span.stop]) / split.tensor
    unembedding = max(table / bandwidth, 2 * work.sampled * table / of_tables / flops) if span.is_last else 0.0
    sums = _sums(model, span.size, split.tensor, work.tokens, link)
    return products + attention + of_states / bandwidth + unembedding + sums


def _used_weights(model: ModelConfig, layers: float, each: float, tokens: float) -> tuple[float, float]:
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
    of_experts *= len(model.layers_with_part("mlp")) / model.num_layers
    share = experts.per_token / experts.count
    in_use = 1 - (1 - share) ** tokens
    return layers - of_experts * (1 - in_use), layers - of_experts * (1 - share)


def _sums(model: ModelConfig, layers: int, tensor: int, tokens: float, link: float) -> float:
    """The time of the sums over devices, two in each layer."""
    if tensor == 1:
        return 0.0
    sent = 2 * (tensor - 1) / tensor * tokens * model.embed_dim * _SUM_BYTES
    return 2 * layers * (sent / link + ALL_REDUCE_SECONDS)
