"""The lightning attention of MiniMax: a mixer with a matrix for each head as its state.

The state of a head decays by a fixed factor with each token, which depends on the head and on the layer in the model.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.kernels.linear_state import LinearTokens, linear_state
from orca_jax.kernels.state_rows import StateRows
from orca_jax.model.layers import ACTIVATIONS, Linear, Norm, kept, project
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker
from orca_jax.model.mixers.base import Index, Mixing, StateArray, StateKind, StatePools
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MixerName

NORM_EPS = 1e-6  # whatever the other norms of the model have


def states(config: ModelConfig) -> tuple[StateArray, ...]:
    """A matrix for each head, from keys to values."""
    heads = config.num_heads
    dim = config.head_dim
    return (StateArray((heads, dim, dim), ("heads", "head_dim", "head_dim"), "float32"),)


def run(
    query: Float[Array, "T H D"],
    key: Float[Array, "T H D"],
    value: Float[Array, "T H D"],
    slopes: Float[Array, " H"],
    pools: StatePools,
    rows: StateRows,
) -> tuple[Float[Array, "T H D"], StatePools]:
    """Run the recurrence on one device."""
    decay = jnp.broadcast_to(-slopes, query.shape[:2])
    out, pool = linear_state(LinearTokens(query, key, value, decay), pools[0], rows)
    return out, (pool,)


_HEADS = (None, "heads", None)
STATE = StateKind(states, run, (_HEADS, _HEADS, _HEADS, ("heads",)), _HEADS)


class LinearInputs(NamedTuple):
    """Queries, keys and values, and the weights of the results."""

    query: Float[Array, "T H D"]
    key: Float[Array, "T H D"]
    value: Float[Array, "T H D"]
    gate: Float[Array, "T X"]


class LinearResults(NamedTuple):
    """The results of all heads, and their weights."""

    heads: Float[Array, "T H D"]
    gate: Float[Array, "T X"]


type GatedInputs = tuple[tuple[Array, ...], Float[Array, "T C"]]
"""The arrays of an operation on states, and the weights of its results."""


class GatedMixer(nnx.Module):
    """The part of a mixer in which an operation on states takes arrays of `project`, and gates weight its results."""

    name: ClassVar[MixerName]

    def mix[Cache](
        self, inputs: GatedInputs, layer: Index, mixing: Mixing[Cache], cache: Cache
    ) -> tuple[LinearResults, Cache]:
        """Convolve and run the recurrence."""
        arrays, gate = inputs
        heads, cache = mixing.advance(layer, self.name, arrays, cache)
        return LinearResults(heads, gate), cache


class LinearAttention(nnx.Module):
    """Projections, linear attention, a norm over all heads together, and a gate for each number."""

    def __init__(self, make: Maker, config: ModelConfig, out_std: float) -> None:
        assert make.span is not None, "the decay depends on the layer"
        self.first_layer = make.span.start
        self.num_layers = make.span.num_layers
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.activation = config.activation
        embed = config.embed_dim
        heads = config.num_heads * config.head_dim
        self.query, self.key, self.value, self.gate = (
            Linear(make, (embed, heads), ("embed", "heads"), bias=False) for _ in range(4)
        )
        self.norm = Norm(make, config, heads, "heads")
        self.norm.eps = NORM_EPS
        self.out = Linear(make, (heads, embed), ("heads", "embed"), bias=False, std=out_std)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers."""
        return [self.query, self.key, self.value, self.gate, self.out]

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> LinearInputs:
        """The inputs of every token. There are no rotary positions; `adapters` have zeros for these layers."""
        act = ACTIVATIONS[self.activation]
        shape = (x.shape[0], self.num_heads, self.head_dim)
        *parts, gate = project(x, [self.query, self.key, self.value, self.gate])
        query, key, value = (act(part).reshape(shape) for part in parts)
        return LinearInputs(query, key, value, jax.nn.sigmoid(gate))

    def mix[Cache](
        self, inputs: LinearInputs, layer: Index, mixing: Mixing[Cache], cache: Cache
    ) -> tuple[LinearResults, Cache]:
        """Run the recurrence."""
        slopes = jnp.asarray(slope_table(self.num_heads, self.num_layers))[self.first_layer + layer]
        heads, cache = mixing.advance(layer, "linear_attention", (*inputs[:3], slopes), cache)
        return LinearResults(heads, inputs.gate), cache

    def merge(
        self,
        out: LinearResults,
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """Normalise, weight and project back, every token or those in `keep`."""
        heads, gate = kept(out, keep)
        return self.out(gate * self.norm(heads.reshape(heads.shape[0], -1)))


def slope_table(num_heads: int, num_layers: int) -> np.ndarray:
    """The decay of each head in each layer of a model, float32 [L, H]; computed in float32 as in transformers."""
    of_head = np.float32(2 ** (-8 / num_heads)) ** np.arange(1, num_heads + 1, dtype=np.float32)
    of_layer = 1 - np.arange(num_layers) / (num_layers - 1 + 1e-5) + 1e-5
    table: np.ndarray = of_layer.astype(np.float32)[:, None] * of_head
    return table
