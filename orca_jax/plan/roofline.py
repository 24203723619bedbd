"""Expected times of iterations from a roofline: each part takes the longer of its memory and its arithmetic.

The shares of the peak rates are assumptions, not measurements of this engine. Not included: the time to start programs,
transfers between pipeline stages, the host, and padding.
"""

from typing import NamedTuple

import numpy as np

from orca_jax.config import ModelConfig
from orca_jax.model.sharding import on_shards, padded_vocab
from orca_jax.plan.accelerators import Accelerator, PeakShares
from orca_jax.plan.memory import Capacity, Demand, Split, StageMemory

ALL_REDUCE_SECONDS = 10e-6  # to start one, assumed
_SUM_BYTES = 4  # of a number in a sum over devices: float32


class IterationWork(NamedTuple):
    """The work of an iteration."""

    tokens: float  # of the merged batch
    read: float  # tokens whose keys and values are read
    pairs: float  # of a token and an attended one
    sampled: float  # tokens to draw


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

    once = IterationWork(fit.rows, fit.rows * fit.context, fit.rows * fit.context, fit.rows)
    interval = fit.split.stages * max(seconds(once))
    length = min(prompt, fit.max_model_len)
    first = sum(seconds(IterationWork(length, length, length * (length + 1) / 2, 1)))
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
    """The time of one stage for an iteration: products of layers, attention, sums over devices, unembedding."""
    bandwidth, flops, link = (
        kind.bandwidth * shares.bandwidth,
        kind.flops * shares.flops,
        kind.link * shares.link,
    )
    span, itemsize = stage.span, np.dtype(demand.dtype).itemsize
    table = padded_vocab(model, split.tensor) * model.embed_dim * itemsize // split.tensor
    tables = span.is_first + (span.is_last and not (span.is_first and model.tied_embeddings))
    layers = stage.weights - tables * table
    products = max(layers / bandwidth, 2 * work.tokens * layers / itemsize / flops)
    slot = 2 * on_shards(model, split.tensor).num_kv_heads * model.head_dim * np.dtype(demand.kv_cache_dtype).itemsize
    scores = 4 * model.num_heads * model.head_dim
    attention = span.size / split.tensor * max(slot * work.read / bandwidth, scores * work.pairs / flops)
    unembedding = max(table / bandwidth, 2 * work.sampled * table / itemsize / flops) if span.is_last else 0.0
    return products + attention + unembedding + _sums(model, span.size, split.tensor, work.tokens, link)


def _sums(model: ModelConfig, layers: int, tensor: int, tokens: float, link: float) -> float:
    """The time of the sums over devices, two in each layer."""
    if tensor == 1:
        return 0.0
    sent = 2 * (tensor - 1) / tensor * tokens * model.embed_dim * _SUM_BYTES
    return 2 * layers * (sent / link + ALL_REDUCE_SECONDS)
