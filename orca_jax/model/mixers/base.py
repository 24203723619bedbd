"""The protocol of token mixers, and of the access to caches that the executor gives them.

A layer runs its mixer in three parts:

    project  inputs of every token, and parameters for `mix`
    mix      separates requests and touches the cache, through a `Mixing`; no other part does
    merge    back to the residual stream, of all tokens or of the kept ones

`mix` uses arrays of its inputs alone, and of the mixer only what all layers share: a loop over layers may call that of
another layer with the same mixer. A layer is named by its index in the stage; it may be a traced scalar. The executor
finds the group of the layer and its index in the group by it, and so the pages or the states.

This is the paper's selective batching: everything else runs on the merged tokens of all requests (section 3.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.model.layers import Linear
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.rope import Rotation
from orca_jax.model.sharding import partition_spec
from orca_jax.values.config import DType, ModelConfig
from orca_jax.values.layer_config import MixerName

type Index = int | Int[Array, ""]
"""The index of a layer in its stage: an integer if layers are unrolled, and else a traced scalar."""

type Attend[Cache] = Callable[
    [Index, Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"], Cache],
    tuple[Float[Array, "T H D"], Cache],
]
"""`attend(layer, q, k, v, cache) -> (out, cache)`. It scales and caps scores itself, and applies the sliding window of
the layer. The sinks of a layer with some are a sixth argument."""

type Inputs = Any
"""The arrays that a mixer's `project` passes to its `mix`: any tree, the same for all layers with this mixer."""

type Mixed = Any
"""The arrays that `mix` passes to `merge`: a tree with the tokens as first axis."""


class StateArray(NamedTuple):
    """One array of a state, as a layer keeps it of one request."""

    shape: tuple[int, ...]  # on all devices together
    axes: tuple[str, ...]  # logical
    dtype: DType | None = None  # None: that of the model


type StatePools = tuple[Array, ...]
"""The states of all layers with a mixer: for each array of a state the pool [N, ...] of `kernels.state_rows`."""


class StateKind(NamedTuple):
    """What the layers with a mixer keep of a request in place of pages, and the operation on it.

    Attributes:
        states: the arrays of a state, for a model.
        run: `run(*arrays, pools, rows) -> (out, pools)` on one device's part, by a kernel.
        arrays: the logical axes of each array that `mix` passes; None for the tokens.
        out: the axes of the result.
    """

    states: Callable[[ModelConfig], tuple[StateArray, ...]]
    run: Callable[..., tuple[Array, StatePools]]
    arrays: tuple[tuple[str | None, ...], ...]
    out: tuple[str | None, ...]

    def on_mesh(self, model: ModelConfig, mesh: Mesh) -> Callable[..., tuple[Array, StatePools]]:
        """The operation on whole arrays: `(*arrays, pools, rows) -> (out, pools)`."""
        if mesh.size == 1:
            return self.run
        pools = tuple(partition_spec((None, *state.axes)) for state in self.states(model))
        arrays = tuple(partition_spec(axes) for axes in self.arrays)
        split: Callable[..., tuple[Array, StatePools]] = jax.shard_map(
            self.run,
            mesh=mesh,
            in_specs=(*arrays, pools, PartitionSpec()),
            out_specs=(partition_spec(self.out), pools),
            # a loop whose trip count is the same on all shards needs no collective
            check_vma=False,
        )
        return split


@runtime_checkable
class Mixing[Cache](Protocol):
    """The access of one launch's layers to their caches. The executor makes one; it gives `cache` its meaning."""

    def attend(
        self,
        layer: Index,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"] | None,
        v: Float[Array, "T K D"] | None,
        cache: Cache,
        sinks: Float[Array, " H"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Cache]:
        """Write the new keys and values to the pages of a layer, and attend over these pages.

        Without `v` the pages have one array, and the values are the keys (`PageShape.has_values`). Without `k` and `v`
        nothing is written: `layer` is then an earlier one, whose pages another layer reads too. `sinks` are scores
        that join the softmax of each head.
        """
        ...

    def advance(
        self, layer: Index, mixer: MixerName, arrays: tuple[Array, ...], cache: Cache
    ) -> tuple[Array, Cache]:
        """Run the operation of `mixers.states` on the states of a layer, from each request's source to its target."""
        ...


@runtime_checkable
class Mixer(Protocol):
    """The token mixer of a layer, an `nnx.Module`."""

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers, whose matrices may be quantised or packed."""
        ...

    def project(
        self, x: Float[Array, "T E"], rotation: Rotation | None, adapters: LayerAdapters | None
    ) -> Inputs:
        """The inputs of `mix`. `adapters` are those of the tokens, None for none."""
        ...

    def mix[Cache](
        self, inputs: Inputs, layer: Index, mixing: Mixing[Cache], cache: Cache
    ) -> tuple[Mixed, Cache]:
        """Let each token see the earlier ones of its request, and keep what later ones need."""
        ...

    def merge(
        self, out: Mixed, keep: Int[Array, "B"] | None, adapters: LayerAdapters | None
    ) -> Float[Array, "B E"]:
        """The mixer's part of the residual stream, of every token or of those in `keep`."""
        ...
