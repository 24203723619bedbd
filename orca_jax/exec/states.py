"""States of layers on the devices: their shapes and bytes, and the access of a launch to them and to pages.

A block of states has one state of each layer with states, of any mixer. The states of the layers with a mixer
are one pool: the i-th of these layers has the states from `i * num_states` on.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array

from orca_jax.kernels.kv_pages import KVPages
from orca_jax.kernels.state_rows import StateRows
from orca_jax.model.block import AttentionOnly
from orca_jax.model.mixers.base import Attend, Index, StatePools
from orca_jax.model.mixers.states import STATES
from orca_jax.model.sharding import partition_spec
from orca_jax.model.stages import LayerSpan
from orca_jax.values.config import DType, ModelConfig
from orca_jax.values.layer_config import MixerName
from orca_jax.values.platforms import platform_of

type PagePools = tuple[KVPages, ...]
"""The pages of each pool."""


type PoolArrays = KVPages | StatePools
"""The arrays of one pool. Each has the same number of rows for each block."""


class Caches(NamedTuple):
    """All that a stage keeps of requests between launches: pages by pool, and states by mixer."""

    pages: PagePools
    states: dict[MixerName, StatePools]  # of the mixers of the stage

    @property
    def pools(self) -> tuple[PoolArrays, ...]:
        """The pools of pages, and then those of states."""
        return (*self.pages, *self.states.values())

    def with_pool(self, index: int, arrays: PoolArrays) -> "Caches":
        """The same with another one of `pools`."""
        pools: list[Any] = list(self.pools)
        pools[index] = arrays
        number = len(self.pages)
        return Caches(tuple(pools[:number]), dict(zip(self.states, pools[number:], strict=True)))


def state_mixers(model: ModelConfig) -> list[MixerName]:
    """The mixers of a model, or of a stage of it, whose layers keep states."""
    return [mixer for mixer in model.mixers if mixer in STATES]


def state_shapes(model: ModelConfig, num_states: int, dtype: DType) -> dict[MixerName, Any]:
    """Shapes of the pools of a stage; no memory is allocated.

    Args:
        model: the configuration of the stage.
        num_states: number of blocks.
        dtype: the type of activations, and of states whose mixer names none.
    """

    def pools(mixer: MixerName) -> tuple[jax.ShapeDtypeStruct, ...]:
        number = num_states * len(model.layers_with(mixer))
        return tuple(
            jax.ShapeDtypeStruct((number, *each.shape), jnp.dtype(each.dtype or dtype))
            for each in STATES[mixer].states(model)
        )

    return {mixer: pools(mixer) for mixer in state_mixers(model)}


def state_specs(model: ModelConfig) -> dict[MixerName, Any]:
    """Partition of the pools of a stage over its mesh."""

    def specs(mixer: MixerName) -> tuple[PartitionSpec, ...]:
        return tuple(partition_spec((None, *each.axes)) for each in STATES[mixer].states(model))

    return {mixer: specs(mixer) for mixer in state_mixers(model)}


class StateDemand(NamedTuple):
    """The blocks of states that a model needs, and their bytes."""

    fewest: int = 0  # without them rows would have to wait
    most: int = 0  # all that can be of use
    layers: tuple[int, ...] = ()  # see `layer_bytes`; empty for models without states

    def block_bytes(self, span: LayerSpan) -> int:
        """Bytes of a block in a pipeline stage."""
        return sum(self.layers[span.start : span.stop])


def state_demand(
    model: ModelConfig, dtype: DType, num_rows: int, num_snapshots: int
) -> StateDemand:
    """The demand of a model: a block for each row, and with snapshots another one, since a row may write elsewhere.

    Args:
        model: all layers.
        dtype: the type of activations.
        num_rows: running requests.
        num_snapshots: snapshots of a request of full length in the prefix cache; 0: there are none.
    """
    if not model.has_states:
        return StateDemand()
    fewest = num_rows * (2 if num_snapshots else 1)
    return StateDemand(fewest, fewest + num_rows * num_snapshots, layer_bytes(model, dtype))


def layer_bytes(model: ModelConfig, dtype: DType) -> tuple[int, ...]:
    """Bytes of a state in each layer, on all devices together; 0 in a layer without one."""
    return tuple(_bytes_of_layer(model, kind.mixer, dtype) for kind in model.layers)


def _bytes_of_layer(model: ModelConfig, mixer: MixerName, dtype: DType) -> int:
    if mixer not in STATES:
        return 0
    return sum(
        math.prod(array.shape) * jnp.dtype(array.dtype or dtype).itemsize
        for array in STATES[mixer].states(model)
    )


class CacheAccess:
    """The `Mixing` of a launch: attention over pages by a function, and the operations on states.

    Args:
        attend: attention of one layer over the pools of pages.
        model: the configuration of the stage.
        mesh: the mesh of the stage.
        rows: the requests, with their blocks of states.
        num_states: number of blocks.
    """

    def __init__(
        self,
        attend: Attend[PagePools],
        model: ModelConfig,
        mesh: Mesh,
        rows: StateRows,
        num_states: int,
    ) -> None:
        self._attend = AttentionOnly(attend)
        self._model = model
        self._mesh = mesh
        self._rows = rows
        self._num_states = num_states

    def attend(
        self,
        layer: Index,
        q: Array,
        k: Array | None,
        v: Array | None,
        cache: Caches,
        sinks: Array | None = None,
    ) -> tuple[Array, Caches]:
        """Attend over the pages of a layer."""
        out, pages = self._attend.attend(layer, q, k, v, cache.pages, sinks)
        return out, cache._replace(pages=pages)

    def advance(
        self, layer: Index, mixer: MixerName, arrays: tuple[Array, ...], cache: Caches
    ) -> tuple[Array, Caches]:
        """Run the operation of a mixer on the states of a layer."""
        rows = self._rows.of_layer(self._num_states * _rank(self._model.layers_with(mixer), layer))
        with jax.named_scope(mixer):
            out, pools = STATES[mixer].on_mesh(self._model, self._mesh)(
                *arrays, cache.states[mixer], rows
            )
        if platform_of(self._mesh.devices.flat[0]).copies_pools:
            out, pools = jax.lax.optimization_barrier((out, pools))
        return out, cache._replace(states={**cache.states, mixer: pools})


def _rank(layers: Sequence[int], layer: Index) -> Index:
    """The index of a layer among those with its mixer."""
    if isinstance(layer, int):
        return layers.index(layer)
    return jnp.searchsorted(jnp.asarray(layers, jnp.int32), layer).astype(jnp.int32)
