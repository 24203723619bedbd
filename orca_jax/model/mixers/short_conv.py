"""The short convolution of LFM: a mixer with the last inputs of a request as its state."""

from typing import NamedTuple

from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.kernels.short_conv import short_conv
from orca_jax.kernels.state_rows import StateRows
from orca_jax.model.layers import Linear, kept, project
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker, optional
from orca_jax.model.mixers.base import Index, Mixing, StateArray, StateKind, StatePools
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig


def states(config: ModelConfig) -> tuple[StateArray, ...]:
    """The last inputs of a request, all that the convolution sees beside the token itself."""
    assert config.short_conv is not None, "the configuration has the sizes of convolutions"
    return (StateArray(((config.short_conv.width - 1) * config.embed_dim,), ("channels",)),)


def run(
    x: Float[Array, "T C"], kernel: Float[Array, "W C"], pools: StatePools, rows: StateRows
) -> tuple[Float[Array, "T C"], StatePools]:
    """Convolve on one device."""
    out, pool = short_conv(x, kernel, pools[0], rows)
    return out, (pool,)


STATE = StateKind(states, run, ((None, "channels"), ("taps", "channels")), (None, "channels"))


class ConvInputs(NamedTuple):
    """The inputs of a convolution, its taps, and the weights of its results."""

    x: Float[Array, "T C"]
    kernel: Float[Array, "W C"]
    bias: Float[Array, " C"] | None
    gate: Float[Array, "T C"]


class ShortConv(nnx.Module):
    """A convolution along the tokens of a request, each channel by itself, with a product before it and one after."""

    def __init__(self, make: Maker, config: ModelConfig, out_std: float) -> None:
        assert config.short_conv is not None, "the configuration has the sizes of convolutions"
        embed = config.embed_dim
        bias = config.short_conv.has_bias
        self.before, self.after, self.value = (
            Linear(make, (embed, embed), ("embed", "channels"), bias=bias) for _ in range(3)
        )
        self.kernel = make((config.short_conv.width, embed), ("taps", "channels"), "normal")
        self.bias = optional(bias, make, (embed,), ("channels",), "zeros")
        self.out = Linear(make, (embed, embed), ("channels", "embed"), bias=bias, std=out_std)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers."""
        return [self.before, self.after, self.value, self.out]

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> ConvInputs:
        """The inputs of every token. There are no rotary positions; `adapters` have zeros for these layers."""
        bias = None
        if self.bias is not None:
            bias = self.bias[...]
        before, after, value = project(x, [self.before, self.after, self.value])
        return ConvInputs(before * value, self.kernel[...], bias, after)

    def mix[Cache](
        self, inputs: ConvInputs, layer: Index, mixing: Mixing[Cache], cache: Cache
    ) -> tuple[Float[Array, "T C"], Cache]:
        """Convolve the inputs of every token."""
        out, cache = mixing.advance(layer, "short_conv", (inputs.x, inputs.kernel), cache)
        if inputs.bias is not None:
            out = out + inputs.bias.astype(out.dtype)
        return inputs.gate * out, cache

    def merge(
        self,
        out: Float[Array, "T C"],
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """Project back, every token or those in `keep`."""
        return self.out(kept(out, keep))
