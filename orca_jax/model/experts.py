"""A mixture of experts in place of a block's MLP: a router chooses a few gated MLPs for each token.

The tokens of all requests go through the experts together. The choice and the result of a token depend on this token
alone, so that they do not depend on the batch. Padding goes through experts as well, and its results are not used.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.config import ModelConfig
from orca_jax.kernels.expert_mlp import ExpertKernels, KernelForm, expert_mlp
from orca_jax.layer_config import ExpertsConfig, RouterConfig
from orca_jax.model.layers import ACTIVATIONS, Maker, Mlp, matmul
from orca_jax.model.quantise import QuantisedExperts
from orca_jax.model.sharding import TENSOR_AXIS, partition_spec


class Experts(nnx.Module):
    """The router, the experts of a layer, and the shared expert of all tokens if the model has one.

    Each device has a part of the width of every expert. The sum over devices is as that of a dense MLP.
    """

    def __init__(self, make: Maker, config: ModelConfig, experts: ExpertsConfig, out_std: float) -> None:
        self.mesh = make.mesh
        self.activation = config.activation
        self.per_token = experts.per_token
        self.is_normalised = experts.is_normalised
        self.rules = experts.router
        make = make.of_each_device()
        embed, width, count = config.embed_dim, config.mlp_dim, experts.count
        self.router = make((embed, count), ("embed", "experts"), "normal")
        self.choice_bias = nnx.data(make((count,), ("experts",), "zeros") if experts.router.has_bias else None)
        self.gate = make.experts((count, embed, width), ("experts", "embed", "mlp"), 0.02)
        self.up = make.experts((count, embed, width), ("experts", "embed", "mlp"), 0.02)
        self.down = make.experts((count, width, embed), ("experts", "mlp", "embed"), out_std)
        shared = SharedExpert(make, config, experts, out_std) if experts.shared_dim else None
        self.shared = nnx.data(shared)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Apply to every token. The devices exchange nothing but the sum of their results."""
        if self.mesh is None or self.mesh.size == 1:
            return self._part(x)
        structure, state = nnx.split(self)

        def on_shard(state: nnx.State, x: Array) -> Array:
            experts: Experts = nnx.merge(structure, state)
            return jax.lax.psum(experts._part(x), TENSOR_AXIS)

        split = jax.shard_map(
            on_shard,
            mesh=self.mesh,
            in_specs=(_specs(state), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,  # a loop whose trip count is the same on all shards needs no collective
        )
        with jax.named_scope("experts"):
            summed: jax.Array = split(state, x)
            return summed

    def _part(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """This device's part of the sum."""
        chosen, weights = self.route(x)
        matrices = self.gate, self.up, self.down
        kernels = ExpertKernels(*(each.parts if isinstance(each, QuantisedExperts) else each[...] for each in matrices))
        form = self.gate.form if isinstance(self.gate, QuantisedExperts) else KernelForm()
        mixed = expert_mlp(x, chosen, weights, kernels, activation=ACTIVATIONS[self.activation], form=form)
        return mixed if self.shared is None else mixed + self.shared(x)

    def route(self, x: Float[Array, "T E"]) -> tuple[Int[Array, "T C"], Float[Array, "T C"]]:
        """The experts of every token, the most probable first, and their weights."""
        rules, products = self.rules, matmul(x, self.router[...])
        scores = jax.nn.softmax(products) if rules.scores == "softmax" else jax.nn.sigmoid(products)
        choice = scores if self.choice_bias is None else scores + self.choice_bias[...].astype(jnp.float32)
        if rules.used_groups < rules.groups:
            choice = _of_best_groups(choice, rules)
        _, chosen = jax.lax.top_k(choice, self.per_token)
        weights = jnp.take_along_axis(scores, chosen, axis=1)
        if self.is_normalised:
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + rules.eps)
        return chosen, weights if rules.scale == 1 else weights * rules.scale


def _of_best_groups(choice: Float[Array, "T X"], rules: RouterConfig) -> Float[Array, "T X"]:
    """The scores of the experts in the best groups; those of others are minus infinity."""
    grouped = choice.reshape(choice.shape[0], rules.groups, -1)
    best = jax.lax.top_k(grouped, rules.best_of_group)[0].sum(axis=2)
    _, used = jax.lax.top_k(best, rules.used_groups)
    is_used = (used[:, :, None] == jnp.arange(rules.groups)).any(axis=1)
    return jnp.where(is_used[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


class SharedExpert(nnx.Module):
    """An expert of all tokens. Each token weights it by its own number, if it has a gate."""

    def __init__(self, make: Maker, config: ModelConfig, experts: ExpertsConfig, out_std: float) -> None:
        weight = make((config.embed_dim, 1), ("embed", "experts"), "normal") if experts.shared_gate else None
        self.weight = nnx.data(weight)
        self.mlp = Mlp(make, config, out_std, experts.shared_dim)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Apply to every token. On several devices the result is this device's part of the sum."""
        out = self.mlp(x)
        return out if self.weight is None else jax.nn.sigmoid(matmul(x, self.weight[...])) * out


def _specs(state: nnx.State) -> nnx.State:
    """The mesh axes of one layer's parameters. The leading axis of stacked ones has been removed."""

    def spec(variable: nnx.Variable[Array]) -> nnx.Variable[PartitionSpec]:
        return variable.replace(partition_spec(variable.get_metadata("axes")[-variable.get_value().ndim :]))

    specs: nnx.State = nnx.map_state(lambda _, variable: spec(variable), state)
    return specs
