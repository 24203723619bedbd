"""The adapters of the tokens of one launch, as the layers use them; traced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.kernels.low_rank import SlotPlan, low_rank, plan_slots
from orca_jax.kernels.low_rank.parts import Operands
from orca_jax.model.lora.stacks import Group
from orca_jax.model.sharding import MESH_AXES, TENSOR_AXIS


@dataclass(frozen=True)
class LayerAdapters:
    """The adapters of a launch's tokens in one layer. `other` is the plan of the kept tokens alone."""

    stacks: Mapping[str, Array]  # of all layers: [L * N, ...]
    groups: Mapping[str, Group]
    mesh: Mesh
    plan: SlotPlan
    other: SlotPlan | None
    first: int | Int[Array, ""]  # of the layer's elements in the stacks

    @property
    def kept(self) -> "LayerAdapters":
        """The adapters of the kept tokens."""
        assert self.other is not None, "no tokens are kept"
        return replace(self, plan=self.other, other=None)

    def additions(self, name: str, x: Float[Array, "T I"]) -> tuple[Float[Array, "T _"], ...]:
        """The additions to the results of a group of linear layers."""
        group = self.groups[name]
        plan = self.plan
        active = self.stacks["active"]
        number = list(self.groups).index(name)
        is_active = jnp.any(active[plan.slot, number] > 0)
        stacks = self.stacks[f"{name}.shrink"], *(self.stacks[target] for target in group.targets)
        axis = MESH_AXES[group.inputs]

        def on_shard(
            x: Array, first: Array, plan: SlotPlan, is_active: Array, shrink: Array, *expand: Array
        ) -> tuple[Array, ...]:
            operands = Operands(shrink, expand, first, active.shape[0])
            return low_rank(x, operands, plan, is_active, total=total)

        total = None
        if self.mesh.size == 1:
            return on_shard(x, jnp.int32(self.first), plan, is_active, *stacks)
        if axis is not None:
            total = _sum_over_devices
        everywhere = PartitionSpec()
        outputs = [MESH_AXES[output] for output in group.outputs]
        split = jax.shard_map(
            on_shard,
            mesh=self.mesh,
            in_specs=(
                *(
                    PartitionSpec(None, axis),
                    everywhere,
                    everywhere,
                    everywhere,
                    PartitionSpec(None, axis, None),
                ),
                *(PartitionSpec(None, None, output) for output in outputs),
            ),
            out_specs=tuple(PartitionSpec(None, output) for output in outputs),
            # a loop whose trip count is the same on all shards needs no collective
            check_vma=False,
        )
        summed: tuple[Array, ...] = split(x, jnp.int32(self.first), plan, is_active, *stacks)
        return summed

    def added(
        self, name: str, x: Float[Array, "T I"], results: Sequence[Float[Array, "T _"]]
    ) -> list[Float[Array, "T _"]]:
        """The results of a group of linear layers with the inputs `x`, and of the adapters of each token."""
        with jax.named_scope("adapters"):
            additions = self.additions(name, x)
            return [result + addition for result, addition in zip(results, additions, strict=True)]


class Adapters:
    """The adapters of a launch's tokens.

    Args:
        stacks: see `stacks.Stacks`.
        groups: the groups of the model.
        slot: the adapter slot of each token; 0 for no adapter.
        mesh: the mesh of the stacks.
        keep: the tokens of the last layer's part after attention; None for all.
    """

    def __init__(
        self,
        stacks: Mapping[str, Array],
        groups: Mapping[str, Group],
        slot: Int[Array, "T"],
        mesh: Mesh,
        keep: Int[Array, "B"] | None = None,
    ) -> None:
        self._num_slots = stacks["active"].shape[0]
        flat = {
            name: each if name == "active" else _by_element(each) for name, each in stacks.items()
        }
        other = None if keep is None else plan_slots(slot[keep], self._num_slots)
        self._layer = LayerAdapters(flat, groups, mesh, plan_slots(slot, self._num_slots), other, 0)

    def of_layer(self, index: int | Int[Array, ""]) -> LayerAdapters:
        """The adapters in a layer, by its index in the stage."""
        return replace(self._layer, first=index * self._num_slots)


def _by_element(stack: Float[Array, "L N X Y"]) -> Float[Array, "M X Y"]:
    return stack.reshape(-1, *stack.shape[2:])


def _sum_over_devices(h: Array) -> Array:
    summed: Array = jax.lax.psum(h, TENSOR_AXIS)
    return summed
