"""The gated delta rule of Qwen3-Next: a mixer with the last inputs of a convolution and a matrix for each head.

The matrix of a head decays by a factor for each token. The token then replaces a share of what its key finds there.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.linear_state import LinearTokens, linear_state
from orca_jax.kernels.short_conv import short_conv
from orca_jax.kernels.state_rows import StateRows
from orca_jax.model.layers import Linear, Norm, kept, project
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker
from orca_jax.model.mixers.base import StateArray, StateKind, StatePools
from orca_jax.model.mixers.linear_attention import GatedInputs, GatedMixer, LinearResults
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import DeltaRuleConfig

_LENGTH_EPS = 1e-6  # added to the squared length of queries and keys


def states(config: ModelConfig) -> tuple[StateArray, ...]:
    """The last inputs of queries, keys and values before their convolution, and a matrix for each head."""
    sizes = _sizes(config)
    matrix = StateArray(
        (sizes.num_heads, sizes.key_dim, sizes.value_dim),
        ("heads", "head_dim", "head_dim"),
        "float32",
    )
    return StateArray(((sizes.width - 1) * (2 * sizes.keys + sizes.values),), ("heads",)), matrix


def _sizes(config: ModelConfig) -> DeltaRuleConfig:
    assert config.delta_rule is not None, "the configuration has the sizes"
    return config.delta_rule


def run(
    query: Float[Array, "T C"],
    key: Float[Array, "T C"],
    value: Float[Array, "T D"],
    query_taps: Float[Array, "W C"],
    key_taps: Float[Array, "W C"],
    value_taps: Float[Array, "W D"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    pools: StatePools,
    rows: StateRows,
) -> tuple[Float[Array, "T H V"], StatePools]:
    """Convolve and run the recurrence on one device."""
    num_tokens, heads, key_dim, value_dim = query.shape[0], *pools[1].shape[1:]
    taps = jnp.concatenate([query_taps, key_taps, value_taps], axis=1)
    mixed, inputs = short_conv(jnp.concatenate([query, key, value], axis=1), taps, pools[0], rows)
    parts = jnp.split(jax.nn.silu(mixed), (query.shape[1], 2 * query.shape[1]), axis=1)

    def unit(x: Float[Array, "T C"]) -> Float[Array, "T G K"]:
        """Vectors of length one; adjacent heads share them."""
        vectors = x.reshape(num_tokens, -1, key_dim)
        return vectors * jax.lax.rsqrt(
            jnp.square(vectors).sum(axis=-1, keepdims=True) + _LENGTH_EPS
        )

    values = parts[2].reshape(num_tokens, heads, value_dim)
    tokens = LinearTokens(unit(parts[0]) * key_dim**-0.5, unit(parts[1]), values, decay, beta)
    out, matrices = linear_state(tokens, pools[1], rows)
    return out, (inputs, matrices)


_BY_HEAD, _TAPS = (None, "heads"), ("taps", "heads")
STATE = StateKind(
    states, run, (*(_BY_HEAD,) * 3, *(_TAPS,) * 3, *(_BY_HEAD,) * 2), (None, "heads", None)
)


class DeltaRule(GatedMixer):
    """Projections, convolutions, the gated delta rule, a norm of each head, and a gate for each number."""

    name = "delta_rule"

    def __init__(self, make: Maker, config: ModelConfig, out_std: float) -> None:
        sizes = _sizes(config)
        embed = config.embed_dim
        self.num_heads = sizes.num_heads
        self.value_dim = sizes.value_dim

        def linear(outputs: int) -> Linear:
            return Linear(make, (embed, outputs), ("embed", "heads"), bias=False)

        self.query = linear(sizes.keys)
        self.key = linear(sizes.keys)
        self.value = linear(sizes.values)
        self.gate = linear(sizes.values)
        self.beta = linear(sizes.num_heads)
        self.step = linear(sizes.num_heads)
        self.query_taps, self.key_taps, self.value_taps = (
            make((sizes.width, channels), ("taps", "heads"), "normal")
            for channels in (sizes.keys, sizes.keys, sizes.values)
        )
        self.rate = make((sizes.num_heads,), ("heads",), "zeros")  # logarithms
        self.step_bias = make((sizes.num_heads,), ("heads",), "ones")
        self.norm = Norm(make, replace(config, norm_offset=0.0), sizes.value_dim, "head_dim")
        self.out = Linear(make, (sizes.values, embed), ("heads", "embed"), bias=False, std=out_std)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers."""
        return [self.query, self.key, self.value, self.gate, self.beta, self.step, self.out]

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> GatedInputs:
        """The inputs of every token. There are no rotary positions; `adapters` have zeros for these layers."""
        *channels, gate, beta, step = project(x, self.linear_layers[:-1])
        rate, bias = (each[...].astype(jnp.float32) for each in (self.rate, self.step_bias))
        decay = -jnp.exp(rate) * jax.nn.softplus(step + bias)
        taps = [each[...] for each in (self.query_taps, self.key_taps, self.value_taps)]
        return (*channels, *taps, decay, jax.nn.sigmoid(beta)), gate

    def merge(
        self,
        out: LinearResults,
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """Normalise each head, weight and project back, every token or those in `keep`."""
        heads, gate = kept(out, keep)
        return self.out(self.norm(heads).reshape(gate.shape) * jax.nn.silu(gate))
