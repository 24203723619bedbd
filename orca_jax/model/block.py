"""A layer of the decoder: attention or another mixer, and an MLP, around the residual stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.model.experts import Experts, MlpAndExperts
from orca_jax.model.layer_inputs import GatedInput
from orca_jax.model.layers import Linear, Mlp, Norm, kept, scaled
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker, optional
from orca_jax.model.mixers.attention import Attention
from orca_jax.model.mixers.attention_mamba import AttentionMamba
from orca_jax.model.mixers.base import Attend, Index, Inputs, Mixed, Mixer, Mixing
from orca_jax.model.mixers.delta_rule import DeltaRule
from orca_jax.model.mixers.latent_attention import LatentAttention
from orca_jax.model.mixers.linear_attention import LinearAttention
from orca_jax.model.mixers.mamba import Mamba
from orca_jax.model.mixers.no_mixer import NoMixer
from orca_jax.model.mixers.short_conv import ShortConv
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import (
    WITHOUT_MLP_NORM,
    MixerName,
    MlpName,
    ResidualFactors,
    SumFactors,
)


@dataclass(frozen=True)
class Pattern:
    """The mixers and MLPs of a stage's layers, in their order, by their names."""

    parts: tuple[tuple[str, ...], ...]

    @cached_property
    def period(self) -> int:
        """The least number of layers after which all parts repeat."""
        parts = self.parts
        number = len(self.parts)
        sizes = (size for size in range(1, number + 1) if number % size == 0)
        return next(size for size in sizes if parts == parts[:size] * (number // size))

    @property
    def num_periods(self) -> int:
        """The number of repetitions."""
        return len(self.parts) // self.period

    @property
    def repeats(self) -> bool:
        """True if a loop has a smaller body than all layers."""
        return self.period == 1 or self.num_periods > 1

    def layers_of(self, path: Sequence[object]) -> list[int]:
        """The layers on the first axis of a stacked parameter of a block: those with the parameter's part, or all."""
        found = [layer for layer, parts in enumerate(self.parts) if path[0] in parts]
        return found or list(range(len(self.parts)))


class AttentionOnly[Cache]:
    """The access of models with attention in all layers, from a function.

    Args:
        attend: see `Attend`.
    """

    def __init__(self, attend: Attend[Cache]) -> None:
        self._attend = attend

    def attend(
        self,
        layer: Index,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"] | None,
        v: Float[Array, "T K D"] | None,
        cache: Cache,
        sinks: Float[Array, " H"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Cache]:
        """Call the function."""
        # Without keys or values the function is that of the engine.
        if sinks is None:
            return self._attend(layer, q, k, v, cache)  # type: ignore[arg-type]
        return self._attend(layer, q, k, v, cache, sinks)  # type: ignore[call-arg, arg-type]

    def advance(
        self, layer: Index, mixer: MixerName, arrays: tuple[Array, ...], cache: Cache
    ) -> tuple[Array, Cache]:
        """Raise NotImplementedError: there are no states."""
        raise NotImplementedError(
            f"layers with {mixer} keep states: call `Decoder.run_layers` with a `Mixing` that has them"
        )


MIXERS: Mapping[MixerName, Callable[[Maker, ModelConfig, float], Mixer]] = {
    "attention": Attention,
    "wide_attention": partial(Attention, mixer="wide_attention"),
    "shared_attention": partial(Attention, mixer="shared_attention"),
    "wide_shared_attention": partial(Attention, mixer="wide_shared_attention"),
    "latent_attention": LatentAttention,
    "short_conv": ShortConv,
    "linear_attention": LinearAttention,
    "delta_rule": DeltaRule,
    "mamba": Mamba,
    "attention_mamba": AttentionMamba,
    "no_mixer": NoMixer,
}
"""By the names of their parameters in a block."""


class Block(nnx.Module):
    """A mixer and an MLP, each with a norm and added to the residual stream, which stays float32.

    A block is one layer, or all layers of a stage in stacks. One layer has one mixer and at most one MLP: the others
    are None (`with_parts`). A stack has each mixer and each MLP of its layers, since a scan needs one tree. The first
    axis of a parameter counts the layers with it (`Pattern.layers_of`). `attention_norm` normalises the inputs of any
    mixer.
    """

    def __init__(self, make: Maker, config: ModelConfig) -> None:
        self.residual = config.residual
        # GPT-2: the residual stream sums 2 L such outputs
        out_std = 0.02 * (2 * config.num_layers) ** -0.5
        self.factors = config.residual_factors or ResidualFactors()
        self.residual_scale = config.residual_scale
        self.attention_norm = Norm(make, config)

        mixers = config.mixers
        makers = {name: make for name in mixers}
        if len(mixers) > 1:
            makers = {name: make.with_layers(config.layers_with(name)) for name in mixers}
        for name, kind in MIXERS.items():
            own = makers.get(name, make)
            is_there = name in makers and own.has_layers
            setattr(self, name, optional(is_there, kind, own, config, out_std))
        if config.residual not in WITHOUT_MLP_NORM:
            self.mlp_norm = Norm(make, config)
        has_both = config.residual == "both_norms"
        self.attention_out_norm = optional(has_both, Norm, make, config)
        self.mlp_out_norm = optional(has_both, Norm, make, config)
        self.layer_scale = optional(config.layer_scale, make, (1,), ("head_dim",), "ones")
        self.layer_input: GatedInput | None = nnx.data(None)
        if config.layer_inputs is not None:
            self.layer_input = nnx.data(GatedInput(make, config, config.layer_inputs))
        others = config.layers_with("dense_mlp")
        self.mlp: Mlp | Experts | MlpAndExperts | None = nnx.data(self._mlp(make, config, out_std))
        dense = make.with_layers(others) if others else make
        has_dense = others and dense.has_layers
        self.dense_mlp = optional(has_dense, Mlp, dense, config, out_std, config.dense_mlp_dim)
        self.has_experts = config.experts is not None

    @staticmethod
    def _mlp(
        make: Maker, config: ModelConfig, out_std: float
    ) -> Mlp | Experts | MlpAndExperts | None:
        """The MLP of most layers; None if no layer of the stage has it."""
        layers = config.layers_with("mlp")
        if len(layers) < config.num_layers:
            make = make.with_layers(layers)
        if not make.has_layers:
            return None
        if config.experts is None:
            return Mlp(make, config, out_std)
        kind = MlpAndExperts if config.experts.beside_dim else Experts
        return kind(make, config, config.experts, out_std)

    def __call__[Cache](
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        layer: Index,
        mixing: Mixing[Cache],
        cache: Cache,
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
        beside: Float[Array, "T P"] | None = None,
    ) -> tuple[Float[Array, "B E"], Cache]:
        """Run one layer on all tokens. If `keep` is given, the part after the mixer runs only on these tokens.

        Args:
            x: the residual stream.
            rotation: rotary positions of the layer, if it has some.
            layer: its index in the stage.
            mixing: access to the cache.
            cache: the cache of all layers.
            keep: tokens.
            adapters: additions to linear layers.
            beside: the inputs of the layer beside the stream, if it has some.
        """
        out, cache = self.mixer.mix(self.project(x, rotation, adapters), layer, mixing, cache)
        return self.finish(x, out, keep, adapters, beside), cache

    @property
    def mixers(self) -> dict[MixerName, Mixer]:
        """The mixers by their names, which are the names of their parameters too."""
        return {name: mixer for name in MIXERS if (mixer := getattr(self, name)) is not None}

    @property
    def mixer(self) -> Mixer:
        """The mixer of a single layer."""
        (mixer,) = self.mixers.values()
        return mixer

    @property
    def mlps(self) -> dict[MlpName, Mlp | Experts | MlpAndExperts]:
        """The MLPs by their names, which are the names of their parameters too."""
        found: dict[MlpName, Mlp | Experts | MlpAndExperts | None] = {
            "mlp": self.mlp,
            "dense_mlp": self.dense_mlp,
        }
        return {name: mlp for name, mlp in found.items() if mlp is not None}

    def with_parts(self, names: Sequence[str]) -> "Block":
        """The same parameters without those of other mixers and MLPs."""
        block: Block = nnx.merge(*nnx.split(self))
        for other in (block.mixers.keys() | block.mlps.keys()) - set(names):
            setattr(block, other, nnx.data(None))
        return block

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> Inputs:
        """The part before `mix`: its inputs."""
        if self.residual == "carried":
            x = self._inputs_of_carried(x)
        elif self.residual != "post_norm":
            x = self.attention_norm(x)
        return self.mixer.project(x, rotation, adapters)

    def _inputs_of_carried(self, x: Float[Array, "T S"]) -> Float[Array, "T _"]:
        """The stream and the embedding, which attention normalises; or the norm of the stream with what is carried."""
        stream, embedded, carried = jnp.split(x, 3, axis=-1)
        if "attention" in self.mixers:
            return jnp.concatenate([stream, embedded], axis=-1)
        return self.attention_norm(stream + carried)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers. Those of experts are not among them: they have their own products."""
        layers: list[Linear] = []
        for mixer in self.mixers.values():
            layers += mixer.linear_layers
        for mlp in self.mlps.values():
            dense = getattr(mlp, "dense", mlp)
            if isinstance(dense, Mlp):
                layers += dense.linear_layers
        if self.layer_input is not None:
            layers += self.layer_input.linear_layers
        return layers

    @property
    def experts(self) -> list[Experts]:
        """The mixtures of experts."""
        mlps = [getattr(mlp, "mlp", mlp) for mlp in self.mlps.values()]
        return [mlp for mlp in mlps if isinstance(mlp, Experts)]

    def scaled(self, branch: Float[Array, "B E"]) -> Float[Array, "B E"]:
        """What attention or the MLP adds to the residual stream."""
        return scaled(branch, self.residual_scale)

    def finish(
        self,
        x: Float[Array, "T E"],
        out: Mixed,
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
        beside: Float[Array, "T P"] | None = None,
    ) -> Float[Array, "B E"]:
        """The part after `mix`, on all tokens or on those in `keep`."""
        if keep is not None and adapters is not None:
            adapters = adapters.kept
        attended = self.mixer.merge(out, keep, adapters)
        own: Callable[..., Array] = next(iter(self.mlps.values()), _nothing)
        # Models with experts have no adapters of MLPs.
        has_adapters = adapters is not None and not self.has_experts
        if has_adapters and isinstance(own, Mlp):
            own = partial(own, adapters=adapters)
        x = _RESIDUALS[self.residual](self, kept(x, keep), attended, own)
        if self.layer_input is not None and beside is not None:
            x = x + self.layer_input(x, kept(beside, keep))
        if self.layer_scale is None:
            return x
        return x * self.layer_scale[...].astype(jnp.float32)


def _nothing(x: Float[Array, "B E"]) -> Float[Array, "B E"]:
    """The MLP of layers without one: its inputs."""
    return x


def _pre_norm(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[..., Array]
) -> Float[Array, "B E"]:
    """Add the attention of normalised inputs, then the MLP of normalised inputs."""
    x = x + block.scaled(attended)
    return x + block.scaled(mlp(block.mlp_norm(x)))


def _post_norm(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[..., Array]
) -> Float[Array, "B E"]:
    """Add the normalised results of attention, then those of the MLP."""
    x = x + block.attention_norm(attended)
    return x + block.mlp_norm(mlp(x))


def _both_norms(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[..., Array]
) -> Float[Array, "B E"]:
    """Add the normalised results of attention and of the MLP, each of normalised inputs."""
    assert block.attention_out_norm is not None and block.mlp_out_norm is not None
    x = x + block.scaled(block.attention_out_norm(attended))
    inputs = [block.mlp_norm(x)]
    if isinstance(block.mlp, MlpAndExperts):
        inputs.append(x)
    return x + block.scaled(block.mlp_out_norm(mlp(*inputs)))


def _parallel(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[..., Array]
) -> Float[Array, "B E"]:
    """Add attention and MLP, both of the same inputs, each with its own norm before it."""
    return x + attended + mlp(block.mlp_norm(x))


def _normed(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[..., Array]
) -> Float[Array, "B E"]:
    """Add the attention to its normalised inputs, and the MLP to its own; both parts of a sum have factors."""
    (name,) = block.mixers
    factors = {
        "attention": block.factors.attention,
        "linear_attention": block.factors.linear_attention,
    }

    def total(
        x: Float[Array, "B E"], branch: Float[Array, "B E"], factors: SumFactors
    ) -> Float[Array, "B E"]:
        return factors.stream * x + factors.branch * branch

    x = block.mlp_norm(total(block.attention_norm(x), attended, factors[name]))
    return total(x, mlp(x), block.factors.mlp)


def _single(
    block: Block, x: Float[Array, "B E"], attended: Float[Array, "B E"], mlp: Callable[..., Array]
) -> Float[Array, "B E"]:
    """Add the only part of the layer, of normalised inputs: the mixer or the MLP. The other passes its inputs on."""
    return x + mlp(attended)


def carried_stream(embedded: Float[Array, "T E"]) -> Float[Array, "T S"]:
    """The inputs of the first layer with the residual "carried": the stream, the embedding, and nothing carried."""
    return jnp.concatenate([embedded, embedded, jnp.zeros_like(embedded)], axis=-1)


def _carried(
    block: Block, x: Float[Array, "B S"], attended: Float[Array, "B E"], mlp: Callable[..., Array]
) -> Float[Array, "B S"]:
    """Add the results of a mixer with a state. Those of attention pass the MLP, and are inputs of the next layer alone.

    `x` is the residual stream, the token's embedding, and what the layer before carries to this one.
    """
    stream, embedded, _ = jnp.split(x, 3, axis=-1)
    if "attention" in block.mixers:
        carried = mlp(block.attention_norm(attended))
        return jnp.concatenate([stream, embedded, carried], axis=-1)
    return jnp.concatenate([stream + attended, embedded, jnp.zeros_like(stream)], axis=-1)


_RESIDUALS: Mapping[str, Callable[[Block, Array, Array, Callable[..., Array]], Array]] = {
    "pre_norm": _pre_norm,
    "post_norm": _post_norm,
    "both_norms": _both_norms,
    "parallel": _parallel,
    "normed": _normed,
    "single": _single,
    "carried": _carried,
}
"""The part of a block after its mixer, by `ModelConfig.residual`."""
