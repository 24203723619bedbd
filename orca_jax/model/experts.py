"""A mixture of experts in place of a block's MLP: a router chooses a few MLPs for each token.

The tokens of all requests go through the experts together. The choice and the result of a token depend on this token
alone, so that they do not depend on the batch. Padding goes through experts as well, and its results are not used.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp import ExpertBiases, ExpertKernels, expert_mlp
from orca_jax.kernels.native import Library
from orca_jax.model.layers import ACTIVATIONS, Mlp, Norm, capped, multiply, plus, scaled
from orca_jax.model.maker import Maker, optional
from orca_jax.model.matrices.base import ExpertMatrices, Matrix
from orca_jax.model.sharding import TENSOR_AXIS, partition_spec
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import ExpertsConfig, RouterConfig


class Experts(nnx.Module):
    """The router, the experts of a layer, and the shared expert of all tokens if the model has one.

    Each device has a part of the width of every expert. The sum over devices is as that of a dense MLP.
    """

    def __init__(
        self, make: Maker, config: ModelConfig, experts: ExpertsConfig, out_std: float
    ) -> None:
        self.mesh = make.mesh
        self.activation = config.activation
        self.clamp = experts.clamp
        self.count = experts.count
        self.per_token = experts.per_token
        self.is_normalised = experts.is_normalised
        self.weighs_inputs = experts.weighs_inputs
        self.rules = experts.router
        make = make.of_each_device()
        embed = config.embed_dim
        width = config.mlp_dim
        count = experts.count
        self.router: Matrix = make.plain_matrix((embed, count), ("embed", "experts"))
        self.choice_bias = optional(experts.router.has_bias, make, (count,), ("experts",), "zeros")
        sizes = (count, embed, width)
        names = ("experts", "embed", "mlp")
        self.gate: ExpertMatrices | None = optional(
            config.gated_mlp, make.experts, sizes, names, 0.02
        )
        self.up: ExpertMatrices = make.experts(sizes, names, 0.02)
        self.down: ExpertMatrices = make.experts(
            (count, width, embed), ("experts", "mlp", "embed"), out_std
        )
        self.router_bias = optional(experts.has_biases, make, (count,), ("experts",), "zeros")
        self.biases: nnx.Dict[nnx.Param[Array]] | None = nnx.data(None)
        if experts.has_biases:
            axes = {"gate": (width, "mlp"), "up": (width, "mlp"), "down": (embed, "embed")}
            biases = {
                name: make((count, size), ("experts", axis), "zeros")
                for name, (size, axis) in axes.items()
            }
            self.biases = nnx.data(nnx.Dict(biases))
        self.shared = optional(experts.shared_dim, SharedExpert, make, config, experts, out_std)
        # Factors on the weights of each expert.
        self.factors = optional(experts.beside_dim, make, (count,), ("experts",), "ones")

    def __call__(
        self, x: Float[Array, "T E"], routed: Float[Array, "T E"] | None = None
    ) -> Float[Array, "T E"]:
        """Apply to every token. The devices exchange nothing but the sum of their results.

        Args:
            x: the inputs of the experts.
            routed: those of the router; None for the same.
        """
        if routed is None:
            routed = x
        if self.is_alone:
            return self._part(x, routed)
        structure, state = nnx.split(self)

        def on_shard(state: nnx.State, x: Array, routed: Array) -> Array:
            experts: Experts = nnx.merge(structure, state)
            return jax.lax.psum(experts._part(x, routed), TENSOR_AXIS)

        split = jax.shard_map(
            on_shard,
            mesh=self.mesh,
            in_specs=(_specs(state), PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
            # a loop whose trip count is the same on all shards needs no collective
            check_vma=False,
        )
        with jax.named_scope("experts"):
            summed: jax.Array = split(state, x, routed)
            return summed

    def _part(self, x: Float[Array, "T E"], routed: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """This device's part of the sum."""
        chosen, weights = self.route(routed)
        form = self.up.expert_form(self.count)
        implementation = "ragged" if form.grouped else None
        gate = None if self.gate is None else self.gate.operand
        kernels = ExpertKernels(gate, self.up.operand, self.down.operand, self._biases())
        inputs = x
        if self.weighs_inputs:
            inputs = x * weights
            weights = jnp.ones_like(weights)
        mix = partial(expert_mlp, activation=self._gated, form=form, implementation=implementation)
        mixed = mix(inputs, chosen, weights, kernels)
        if self.shared is None:
            return mixed
        return mixed + self.shared(x)

    @property
    def is_alone(self) -> bool:
        """True on one device."""
        return self.mesh is None or self.mesh.size == 1

    @property
    def matrices(self) -> dict[str, ExpertMatrices]:
        """The matrices of all experts, by their names."""
        named = {"gate": self.gate, "up": self.up, "down": self.down}
        return {name: held for name, held in named.items() if held is not None}

    def pack(self, library: Library, num_devices: int) -> None:
        """Replace matrices by their packed forms, on one device. Those of experts are replaced if all have one."""
        if not self.is_alone:
            return
        self.router = self.router.packed(library, num_devices)
        if self.shared is not None:
            self.shared.pack(library, num_devices)
        if self.has_packed_form(library):
            for name, held in self.matrices.items():
                setattr(self, name, held.packed(library, num_devices))

    def has_packed_form(self, library: Library) -> bool:
        """True if the matrices of all experts have packed forms, on one device, or are packed already."""
        return self.is_alone and all(
            [held.has_packed_form(library) for held in self.matrices.values()]
        )

    def _biases(self) -> ExpertBiases | None:
        """The biases of the experts. Each device has its part of those that are added after the projections back."""
        if self.biases is None:
            return None
        gate, up, down = (
            self.biases[name][...].astype(jnp.float32) for name in ExpertBiases._fields
        )
        if self.mesh is not None:
            down = down / self.mesh.size
        return ExpertBiases(gate, up, down)

    def _gated(
        self, gate: Float[Array, "*any"] | None, up: Float[Array, "*any"]
    ) -> Float[Array, "*any"]:
        """The vector that an expert projects back."""
        if gate is None:
            return ACTIVATIONS[self.activation](up)
        if self.clamp is None:
            return ACTIVATIONS[self.activation](gate) * up
        limit, slope = self.clamp
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(slope * gate) * (jnp.clip(up, -limit, limit) + 1)

    def route(self, x: Float[Array, "T E"]) -> tuple[Int[Array, "T C"], Float[Array, "T C"]]:
        """The experts of every token, the most probable first, and their weights."""
        rules = self.rules
        products = capped(plus(multiply(x, self.router)[0], self.router_bias), rules.soft_cap)
        if rules.scores == "two_softmaxes":
            return _of_two_softmaxes(products, rules.reach)
        scores = _SCORES[rules.scores](products)
        choice = plus(products if self.weighs_inputs else scores, self.choice_bias)
        if rules.used_groups < rules.groups:
            choice = _of_best_groups(choice, rules)
        best, chosen = jax.lax.top_k(choice, self.per_token)
        weights = best if choice is scores else jnp.take_along_axis(scores, chosen, axis=1)
        if self.is_normalised:
            total = jnp.sum(weights, axis=1, keepdims=True)
            if rules.eps:
                total = total + rules.eps
            if rules.least_sum:
                total = jnp.maximum(total, rules.least_sum)
            weights = weights / total
        if self.factors is not None:
            weights = weights * self.factors[...].astype(jnp.float32)[chosen]
        return chosen, scaled(weights, rules.scale)


_SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


def _of_best_groups(choice: Float[Array, "T X"], rules: RouterConfig) -> Float[Array, "T X"]:
    """The scores of the experts in the best groups; those of others are minus infinity."""
    grouped = choice.reshape(choice.shape[0], rules.groups, -1)
    best = jax.lax.top_k(grouped, rules.best_of_group)[0].sum(axis=2)
    _, used = jax.lax.top_k(best, rules.used_groups)
    is_used = (used[:, :, None] == jnp.arange(rules.groups)).any(axis=1)
    return jnp.where(is_used[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def _of_two_softmaxes(
    products: Float[Array, "T X"], reach: float
) -> tuple[Int[Array, "T 2"], Float[Array, "T 2"]]:
    """The two best experts. Each is weighted by a softmax over those near it and not chosen yet (arXiv 2409.12136)."""
    left = products
    found = []
    for _ in range(2):
        best = left.max(axis=1, keepdims=True)
        is_far = (best - products) / jnp.maximum(jnp.abs(products), best) > reach
        chosen = jnp.argmax(left, axis=1)[:, None]
        shares = jax.nn.softmax(jnp.where(is_far, -jnp.inf, left))
        found.append((chosen, jnp.take_along_axis(shares, chosen, axis=1)))
        left = jnp.where(jnp.arange(left.shape[1]) == chosen, -jnp.inf, left)
    experts, weights = zip(*found, strict=True)
    return jnp.concatenate(experts, axis=1), jnp.concatenate(weights, axis=1)


class SharedExpert(nnx.Module):
    """An expert of all tokens. Each token weights it by its own number, if it has a gate."""

    def __init__(
        self, make: Maker, config: ModelConfig, experts: ExpertsConfig, out_std: float
    ) -> None:
        sizes = (config.embed_dim, 1)
        self.weight: Matrix | None = optional(
            experts.shared_gate, make.plain_matrix, sizes, ("embed", "experts")
        )
        self.mlp = Mlp(make, config, out_std, experts.shared_dim)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Apply to every token. On several devices the result is this device's part of the sum."""
        out = self.mlp(x)
        if self.weight is None:
            return out
        return jax.nn.sigmoid(multiply(x, self.weight)[0]) * out

    def pack(self, library: Library, num_devices: int) -> None:
        """Replace matrices by their packed forms, on one device."""
        if self.weight is not None:
            self.weight = self.weight.packed(library, num_devices)
        for layer in self.mlp.linear_layers:
            layer.pack(library, num_devices)


class MlpAndExperts(nnx.Module):
    """The sum of an MLP and of experts, each with a norm after it; experts and router read the stream (Gemma 4)."""

    def __init__(
        self, make: Maker, config: ModelConfig, experts: ExpertsConfig, out_std: float
    ) -> None:
        self.dense = Mlp(make, config, out_std, experts.beside_dim)
        self.mlp = Experts(make, config, experts, out_std)
        self.dense_norm, self.in_norm, self.out_norm = (Norm(make, config) for _ in range(3))
        self.router_norm = Norm(make, config)
        self.factor = config.embed_dim**-0.5

    def __call__(self, x: Float[Array, "T E"], stream: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Apply to every token, with the normalised stream and the stream itself."""
        mixed = self.mlp(self.in_norm(stream), self.router_norm(stream) * self.factor)
        return self.dense_norm(self.dense(x)) + self.out_norm(mixed)


def _specs(state: nnx.State) -> nnx.State:
    """The mesh axes of one layer's parameters. The leading axis of stacked ones has been removed."""

    def spec(variable: nnx.Variable[Array]) -> nnx.Variable[PartitionSpec]:
        return variable.replace(
            partition_spec(variable.get_metadata("axes")[-variable.get_value().ndim :])
        )

    specs: nnx.State = nnx.map_state(lambda _, variable: spec(variable), state)
    return specs
