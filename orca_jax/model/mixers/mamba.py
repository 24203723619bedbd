"""Mamba-2 (arXiv 2405.21060): a mixer with the last inputs of two convolutions and a matrix for each head.

In the words of linear attention, inputs times their steps are the values, and `B` and `C` the keys and the queries of
a group of heads.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.linear_state import LinearTokens, linear_state
from orca_jax.kernels.short_conv import short_conv
from orca_jax.kernels.state_rows import StateRows
from orca_jax.model.layers import Linear, kept, project
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker, optional
from orca_jax.model.mixers.base import StateArray, StateKind, StatePools
from orca_jax.model.mixers.linear_attention import GatedInputs, GatedMixer, LinearResults
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import MambaConfig, MixerName

_OF_ALL = "head_dim"  # the logical axis of keys and queries: each device has those of all groups


def states(config: ModelConfig) -> tuple[StateArray, ...]:
    """The last inputs of the convolutions of values and of keys with queries, and a matrix for each head."""
    sizes = _sizes(config)
    return (
        StateArray(((sizes.width - 1) * sizes.values,), ("heads",)),
        StateArray(((sizes.width - 1) * sizes.keys,), (_OF_ALL,)),
        StateArray(
            (sizes.num_heads, sizes.state_dim, sizes.head_dim),
            ("heads", "head_dim", "head_dim"),
            "float32",
        ),
    )


def _sizes(config: ModelConfig) -> MambaConfig:
    assert config.mamba is not None, "the configuration has the sizes"
    return config.mamba


def run(
    x: Float[Array, "T C"],
    keys: Float[Array, "T D"],
    taps: Float[Array, "W C"],
    key_taps: Float[Array, "W D"],
    bias: Float[Array, " C"],
    key_bias: Float[Array, " D"],
    step: Float[Array, "T H"],
    rate: Float[Array, " H"],
    skip: Float[Array, " H"],
    group: Int[Array, " H"],
    pools: StatePools,
    rows: StateRows,
) -> tuple[Float[Array, "T H P"], StatePools]:
    """Convolve and run the recurrence on one device; `group` has the group of each of its heads."""
    num_tokens = x.shape[0]
    state_dim = pools[2].shape[2]
    mixed, inputs = short_conv(x, taps, pools[0], rows)
    mixed_keys, key_inputs = short_conv(keys, key_taps, pools[1], rows)
    values = jax.nn.silu(mixed + bias).reshape(num_tokens, group.shape[0], -1)
    of_groups = jax.nn.silu(mixed_keys + key_bias).reshape(num_tokens, 2, -1, state_dim)
    key, query = of_groups[:, 0], of_groups[:, 1]
    inputs_of_heads = values * step[..., None], -rate * step
    tokens = LinearTokens(query, key, *inputs_of_heads, group=group)
    out, matrices = linear_state(tokens, pools[2], rows)
    return out + skip[:, None] * values, (inputs, key_inputs, matrices)


_BY_HEAD, _HEADS = (None, "heads"), ("heads",)
_ARRAYS = (
    _BY_HEAD,
    (None, None),
    ("taps", "heads"),
    (None, None),
    _HEADS,
    (None,),
    _BY_HEAD,
    _HEADS,
    _HEADS,
    _HEADS,
)
STATE = StateKind(states, run, _ARRAYS, (None, "heads", None))


class Mamba(GatedMixer):
    """Projections, convolutions, the recurrence, and a gate for each number before a norm of each group."""

    name: ClassVar[MixerName] = "mamba"

    def __init__(self, make: Maker, config: ModelConfig, out_std: float) -> None:
        self.sizes = _sizes(config)
        self.eps = config.norm_eps
        embed = config.embed_dim
        sizes = self.sizes
        bias = self.sizes.has_bias
        self.gate, self.value = (
            Linear(make, (embed, sizes.values), ("embed", "heads"), bias=bias) for _ in range(2)
        )
        self.key = Linear(make, (embed, sizes.keys), ("embed", _OF_ALL), bias=bias)
        self.step = Linear(make, (embed, sizes.num_heads), ("embed", "heads"), bias=bias)
        channels = ((sizes.values, "heads"), (sizes.keys, _OF_ALL))
        self.taps, self.key_taps = (
            make((sizes.width, size), ("taps", axis), "normal") for size, axis in channels
        )
        has_bias = sizes.has_conv_bias
        self.bias, self.key_bias = (
            optional(has_bias, make, (size,), (axis,), "zeros") for size, axis in channels
        )
        self.rate, self.step_bias, self.skip = (
            make((sizes.num_heads,), ("heads",), init) for init in ("zeros", "ones", "ones")
        )  # `rate` has logarithms
        self.norm = optional(sizes.norm, make, (sizes.values,), ("heads",), "ones")
        self.out = Linear(make, (sizes.values, embed), ("heads", "embed"), bias=bias, std=out_std)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers."""
        return [self.gate, self.value, self.key, self.step, self.out]

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> GatedInputs:
        """The inputs of every token. There are no rotary positions; `adapters` have zeros for these layers."""
        sizes = self.sizes
        gate, value, key, step = project(x, self.linear_layers[:-1])
        rate, step_bias, skip = (
            each[...].astype(jnp.float32) for each in (self.rate, self.step_bias, self.skip)
        )
        step = jnp.clip(jax.nn.softplus(step + step_bias), *sizes.step_limits)
        biases = [
            jnp.zeros(size) if bias is None else bias[...].astype(jnp.float32)
            for bias, size in ((self.bias, sizes.values), (self.key_bias, sizes.keys))
        ]
        group = jnp.arange(sizes.num_heads) // (sizes.num_heads // sizes.num_groups)
        taps = self.taps[...], self.key_taps[...]
        return (value, key, *taps, *biases, step, jnp.exp(rate), skip, group), gate

    def merge(
        self,
        out: LinearResults,
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """Weight, normalise each group, in this order or the other one, and project back, every token or `keep`."""
        heads, gate = kept(out, keep)
        x = heads.reshape(gate.shape)
        weights = jax.nn.silu(gate)
        if self.norm is None or self.sizes.norm == "gate_first":
            x = x * weights
        if self.norm is not None:
            grouped = x.reshape(gate.shape[0], self.sizes.num_groups, -1)
            grouped = grouped * jax.lax.rsqrt(
                jnp.square(grouped).mean(axis=-1, keepdims=True) + self.eps
            )
            x = grouped.reshape(gate.shape) * self.norm[...].astype(jnp.float32)
        if self.sizes.norm == "gate_last":
            x = x * weights
        return self.out(x)
