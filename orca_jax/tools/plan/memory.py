"""Memory of each device for one way of splitting a model, by the engine's own arithmetic, without any device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from orca_jax.assembly.choices import PAGE_SIZE, Budget
from orca_jax.assembly.resolve import can_view, most_snapshots
from orca_jax.exec.cache import (
    CPU_SHARE,
    SHARED,
    WHOLE,
    fewest_blocks,
    size_cache,
    stage_bytes,
    weight_bytes,
    workspace_bytes,
)
from orca_jax.exec.states import state_demand
from orca_jax.model.load import abstract_decoder
from orca_jax.model.published.load import keep_planned
from orca_jax.model.sharding import TENSOR_AXIS, on_shards
from orca_jax.model.stages import LayerSpan, spans
from orca_jax.model.transformer import Decoder
from orca_jax.tools.plan.accelerators import Accelerator
from orca_jax.values.cache_spec import form_groups
from orca_jax.values.config import CacheConfig, DType, ModelConfig, PageDType, Quantization
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import platform_named


@dataclass(frozen=True)
class Demand:
    """The settings of the user. None is chosen: most rows, and the longest requests."""

    dtype: DType
    kv_cache_dtype: PageDType
    utilization: float  # share of an accelerator's memory
    context: int | None = None  # tokens of a request on average
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    quantization: Quantization | None = None  # of the weights; None: as in config.json

    def quantised(self, model: ModelConfig) -> ModelConfig:
        """The model with this kind of weights."""
        return replace(model, quantization=self.quantization or model.quantization)


@dataclass(frozen=True)
class Split:
    """A copy of the model on `tensor * stages` devices."""

    tensor: int
    stages: int

    @property
    def num_devices(self) -> int:
        """The number of devices of a copy."""
        return self.tensor * self.stages


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each device of a stage."""

    span: LayerSpan
    weights: int
    workspace: int  # for programs, beside weights and cache
    cache: int  # of pages and states; 0 if the model does not fit


@dataclass(frozen=True)
class Capacity:
    """The memory of a split, and the requests for which it suffices.

    Attributes:
        split: the way of splitting.
        stages: memory of each stage.
        rows: `--max-num-seqs`, of one of the batches that follow each other through the stages.
        max_model_len: tokens of the longest request.
        context: tokens of a request on average.
        cache: the KV cache; without blocks if the model does not fit.
        shortage: bytes lacking on a device; 0 if the model fits.
    """

    split: Split
    stages: tuple[StageMemory, ...]
    rows: int
    max_model_len: int
    context: int
    cache: CacheConfig
    shortage: int = 0

    @property
    def num_rows(self) -> int:
        """The most running requests: a batch for each stage."""
        return self.rows * self.split.stages

    @property
    def cache_tokens(self) -> int:
        """The tokens for which the KV cache has room, in requests of `context` tokens."""
        found = []
        for pool, number in enumerate(self.cache.num_blocks):
            groups = [group for group in self.cache.groups if group.pool == pool]
            slots = [
                PAGE_SIZE * group.blocks_in_decode(self.context, PAGE_SIZE)
                for group in groups
                if group.window
            ]
            full = self.context * sum(group.window is None for group in groups)
            found.append(number * PAGE_SIZE * self.context // (full + sum(slots)))
        return min(found)

    @property
    def request_layer_tokens(self) -> int:
        """Tokens times layers for which a request of `context` tokens holds pages while it generates."""
        return sum(
            PAGE_SIZE * group.pages_per_block * group.blocks_in_decode(self.context, PAGE_SIZE)
            for group in self.cache.groups
        )


def fit(model: ModelConfig, split: Split, kind: Accelerator, demand: Demand) -> Capacity:
    """Return the most rows and the longest requests that fit, or the shortage with the fewest and shortest ones.

    The longest requests come first: a shorter `max_model_len` is chosen only if a single row does not fit.
    """
    last = None
    for length in _lengths(model, demand):
        context = min(demand.context or min(1024, max(1, length // 2)), length)
        for rows in _row_counts(demand):
            last = _fit(model, split, kind, demand, rows, length, context)
            is_enough = (
                demand.max_num_seqs is not None or last.cache_tokens >= last.num_rows * context
            )
            if not last.shortage and (is_enough or rows == 1):
                return last
    assert last is not None
    return last


def cache_memory(kind: Accelerator, needed: int, utilization: float) -> int:
    """Bytes for the KV cache on a device: the rest beside weights and workspace, as `exec/cache.free_memory`."""
    if platform_named(kind.platform).is_host:
        return int((kind.memory - needed) * CPU_SHARE)
    return int(kind.memory * utilization) - needed


def _lengths(model: ModelConfig, demand: Demand) -> Sequence[int]:
    if demand.max_model_len is not None:
        return [demand.max_model_len]
    lengths = [model.max_positions]
    while lengths[-1] > 1024:
        lengths.append(max(1024, lengths[-1] // 2))
    return lengths


def _row_counts(demand: Demand) -> Sequence[int]:
    if demand.max_num_seqs is None:
        return [2**power for power in range(8, -1, -1)]
    return [demand.max_num_seqs]


def _fit(
    model: ModelConfig,
    split: Split,
    kind: Accelerator,
    demand: Demand,
    rows: int,
    length: int,
    context: int,
) -> Capacity:
    model = on_shards(demand.quantised(model), split.tensor)
    num_rows = rows * split.stages
    platform = platform_named(kind.platform)
    largest = Budget(None, rows).largest(kind.platform)
    workspace = workspace_bytes(model, largest, num_rows, length, split.tensor)
    parts = [
        (span, stage_weights(model, demand.dtype, split.tensor, span))
        for span in spans(model, split.stages)
    ]
    # As in assembly/resolve.py.
    room = cache_memory(kind, max(weights for _, weights in parts) + workspace, demand.utilization)
    groups = form_groups(
        model.layer_caches,
        length,
        views=can_view(demand.kv_cache_dtype, has_tiles=platform.has_tiles),
    )
    form = CacheConfig(groups, (), PAGE_SIZE, demand.kv_cache_dtype, platform.page_layout)
    sizes = {"num_rows": num_rows, "max_model_len": length, "longest": min(largest, length)}
    use = SHARED if platform.is_host else WHOLE
    states = state_demand(model, demand.dtype, num_rows, most_snapshots(length))
    own = [span for span, _ in parts]
    memory = room * split.tensor
    try:
        cache = size_cache(form, own, memory=memory, states=states, use=use, **sizes)
        shortage = 0
    except ConfigError:
        blocks = fewest_blocks(form.groups, page_size=PAGE_SIZE, **sizes)
        cache = replace(form, num_blocks=blocks, num_states=states.fewest)
        shortage = max(stage_bytes(cache, span, states) for span in own) // split.tensor - room
        cache = replace(form, num_blocks=tuple(0 for _ in blocks))
    stages = [
        StageMemory(span, each, workspace, stage_bytes(cache, span, states) // split.tensor)
        for span, each in parts
    ]
    return Capacity(split, tuple(stages), rows, length, context, cache, shortage)


def stage_weights(model: ModelConfig, dtype: DType, tensor: int, span: LayerSpan) -> int:
    """Bytes of the weights of a stage on each device."""
    layers = span.num_layers
    # middle stages differ in size alone
    start = 0 if span.is_first else layers - span.size if span.is_last else 1
    return _traced_weights(model, dtype, tensor, LayerSpan(start, start + span.size, layers))


@cache
def _traced_weights(model: ModelConfig, dtype: DType, tensor: int, span: LayerSpan) -> int:
    """The same, from shapes: the decoder is traced on a mesh without devices."""
    mesh = AbstractMesh((tensor,), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))
    decoder: Decoder = nnx.merge(*abstract_decoder(model, dtype, mesh, span))
    if model.stored is not None and model.quantization is None:
        keep_planned(decoder, model.stored)
    return weight_bytes(decoder)
