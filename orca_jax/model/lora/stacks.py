"""The adapters of all slots on the devices of a stage: shapes, shardings and the program that writes a slot."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int
from numpy.typing import NDArray

from orca_jax.model.parameters import copied_columns
from orca_jax.model.sharding import partition_spec
from orca_jax.values.config import DType, LoraConfig, ModelConfig


class Group(NamedTuple):
    """Linear layers of a block with the same input. Their matrices `A` are next to each other in one."""

    targets: tuple[str, ...]
    inputs: str  # logical axis
    outputs: tuple[str, ...]  # logical axis of each target


GROUPS: Mapping[str, Group] = {
    "attention": Group(("query", "key", "value"), "embed", ("heads", "kv_heads", "kv_heads")),
    "attention_out": Group(("out",), "heads", ("embed",)),
    "mlp": Group(("gate", "up"), "embed", ("mlp", "mlp")),
    "mlp_out": Group(("down",), "mlp", ("embed",)),
}

Stacks = dict[str, Array]
"""By name: `<group>.shrink [L, N, I, K]`, `<target> [L, N, R, O]`, and `active [N, G]` with 1 for each group that the
adapter of a slot changes. L layers of the stage, N slots, of which slot 0 is zeros."""


def groups_of(model: ModelConfig) -> dict[str, Group]:
    """The groups of a model, in the order of `active`."""
    groups = dict(GROUPS)
    if not model.gated_mlp:
        groups["mlp"] = Group(("up",), "embed", ("mlp",))
    if model.experts is not None:
        del groups["mlp"], groups["mlp_out"]
    return groups


def group_of(target: str, model: ModelConfig) -> tuple[int, str, Group]:
    """The group of a linear layer: its number in `active`, its name, and itself."""
    groups = enumerate(groups_of(model).items())
    return next(
        (number, name, group) for number, (name, group) in groups if target in group.targets
    )


def width_of(axis: str, model: ModelConfig) -> int:
    """The size of a logical axis."""
    sizes = {
        "embed": model.embed_dim,
        "heads": model.num_heads * model.head_dim,
        "kv_heads": model.num_kv_heads * model.head_dim,
        "mlp": model.mlp_dim,
    }
    return sizes[axis]


def value_shapes(
    model: ModelConfig, rank: int
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """The shape and the logical axes of each array of one adapter, for the layers of `model`."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    layers = model.num_layers
    groups = groups_of(model)
    for name, group in groups.items():
        width = rank * len(group.targets)
        shapes[f"{name}.shrink"] = (
            (layers, width_of(group.inputs, model), width),
            ("layers", group.inputs, "rank"),
        )
        for target, axis in zip(group.targets, group.outputs, strict=True):
            shapes[target] = (layers, rank, width_of(axis, model)), ("layers", "rank", axis)
    shapes["active"] = (len(groups),), ("groups",)
    return shapes


def stack_names(model: ModelConfig) -> list[str]:
    """The names of the arrays in their order."""
    return list(value_shapes(model, 1))


def zero_values(model: ModelConfig, lora: LoraConfig, dtype: DType) -> dict[str, NDArray[Any]]:
    """The arrays of an adapter without effect, on the host."""
    shapes = value_shapes(model, lora.max_rank)
    return {name: np.zeros(shape, _dtype(name, dtype)) for name, (shape, _) in shapes.items()}


def stored_width(target: str, model: ModelConfig) -> int:
    """The outputs of a linear layer in checkpoints: one copy of each key/value head."""
    _, _, group = group_of(target, model)
    width = width_of(group.outputs[group.targets.index(target)], model)
    if target in ("key", "value"):
        return width // model.kv_copies
    return width


def place_matrices(
    out: Mapping[str, NDArray[Any]],
    target: str,
    layer: int,
    a: np.ndarray,
    b: np.ndarray,
    model: ModelConfig,
    max_rank: int,
) -> None:
    """Write the matrices of a linear layer into the arrays of an adapter.

    Args:
        out: the arrays.
        target: the name of the linear layer.
        layer: its layer.
        a: [rank, inputs].
        b: [outputs in checkpoints, rank], with the adapter's factor.
        model: the model as the devices hold it.
        max_rank: the rank of the arrays.
    """
    number, name, group = group_of(target, model)
    rank = a.shape[0]
    first = group.targets.index(target) * max_rank
    if target in ("key", "value") and model.kv_copies > 1:
        copies = range(len(b) * model.kv_copies)
        b = b[copied_columns(copies, model.kv_copies, model.head_dim)]
    out[f"{name}.shrink"][layer, :, first : first + rank] = a.T
    out[target][layer, :rank] = b.T
    out["active"][number] = 1


def value_specs(
    model: ModelConfig, lora: LoraConfig, dtype: DType, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of one adapter with their shardings; `model` has the layers of a stage."""
    return {
        name: jax.ShapeDtypeStruct(
            shape, _dtype(name, dtype), sharding=NamedSharding(mesh, partition_spec(axes))
        )
        for name, (shape, axes) in value_shapes(model, lora.max_rank).items()
    }


def stack_specs(
    model: ModelConfig, lora: LoraConfig, dtype: DType, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of all slots with their shardings; `model` has the layers of a stage."""
    slots = lora.num_slots + 1
    specs = {}
    for name, (shape, axes) in value_shapes(model, lora.max_rank).items():
        before = () if name == "active" else (0,)  # the axis of layers comes first
        at = len(before)
        sharding = NamedSharding(mesh, partition_spec((*axes[:at], "slots", *axes[at:])))
        whole = (*shape[:at], slots, *shape[at:])
        specs[name] = jax.ShapeDtypeStruct(whole, _dtype(name, dtype), sharding=sharding)
    return specs


def stack_bytes(model: ModelConfig, lora: LoraConfig, dtype: DType, mesh: Mesh) -> int:
    """Bytes of the adapters on each device of a stage."""
    specs = stack_specs(model, lora, dtype, mesh).values()
    return sum(
        math.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize for each in specs
    )


def write_slot(stacks: Stacks, slot: Int[Array, " 1"], values: Mapping[str, Array]) -> Stacks:
    """The stacks with the values of an adapter in a slot; traced."""
    written = {}
    for name, stack in stacks.items():
        place = stack.at[slot[0]] if name == "active" else stack.at[:, slot[0]]
        written[name] = place.set(values[name])
    return written


def _dtype(name: str, dtype: DType) -> jnp.dtype:
    return jnp.dtype(jnp.int32 if name == "active" else dtype)
