"""The parts shared by the implementations: the order of tokens by slot, and operands."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.values.cache_spec import ceil_div

# tokens of one slot that are multiplied together on a CPU; 2 and 8 took longer (docs/adapters.md)
TILE = 4


class SlotPlan(NamedTuple):
    """The tokens of a launch in the order of their slots, the same for all layers. Slot 0 has no adapter.

    A tile is up to `TILE` tokens of one slot. The tokens of slot 0 are in none.
    """

    slot: Int[Array, "T"]  # of each token
    order: Int[Array, "T"]  # tokens, sorted by slot
    place: Int[Array, "T"]  # of each token in this order
    sizes: Int[Array, "N"]  # tokens of each slot
    tile_slot: Int[Array, "M"]
    tile_start: Int[Array, "M"]  # place of the first token of each tile
    num_tiles: Int[Array, ""]  # tiles in use


class Operands(NamedTuple):
    """The matrices of one group of projections, of all slots and layers.

    Slot s of a layer is the element `first + s`, and the layer has the slots `0..num_slots-1`.
    """

    shrink: Float[Array, "M I K"]  # K is the sum of the ranks of the projections
    expand: tuple[Float[Array, "M R _"], ...]  # of each projection
    first: int | Int[Array, ""]
    num_slots: int

    def of_layer(self, stack: Float[Array, "M X Y"]) -> Float[Array, "N X Y"]:
        """The matrices of this layer in a stack."""
        return jax.lax.dynamic_slice_in_dim(stack, self.first, self.num_slots)


type Sum = Callable[[Array], Array]


def plan_slots(slot: Int[Array, "T"], num_slots: int) -> SlotPlan:
    """Sort the tokens by slot, and cut them into tiles.

    Args:
        slot: the adapter slot of each token, below `num_slots`.
        num_slots: N, with slot 0.
    """
    tokens = slot.shape[0]
    slot = slot.astype(jnp.int32)
    index = jnp.arange(tokens, dtype=jnp.int32)
    slots = jnp.arange(num_slots)
    # one array of unique keys sorts faster than a pair
    order = jax.lax.sort(slot * tokens + index) % tokens
    place = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    sizes = jnp.sum(slot[:, None] == slots, axis=0, dtype=jnp.int32)
    tiles = jnp.where(slots > 0, (sizes + TILE - 1) // TILE, 0).astype(jnp.int32)
    before = slots[:, None] < slots  # sums of a triangle: `cumsum` compiles slowly
    first_token = jnp.sum(jnp.where(before, sizes[:, None], 0), axis=0, dtype=jnp.int32)
    first_tile = jnp.sum(jnp.where(before, tiles[:, None], 0), axis=0, dtype=jnp.int32)
    tile = jnp.arange(ceil_div(tokens, TILE) + min(tokens, num_slots - 1), dtype=jnp.int32)
    tile_slot = jnp.sum(tile[:, None] >= (first_tile + tiles), axis=1, dtype=jnp.int32)
    tile_slot = jnp.minimum(tile_slot, num_slots - 1)  # of tiles out of use: any
    tile_start = first_token[tile_slot] + (tile - first_tile[tile_slot]) * TILE
    return SlotPlan(
        slot, order, place, sizes, tile_slot, tile_start, jnp.sum(tiles, dtype=jnp.int32)
    )


def split_ranks(
    h: Float[Array, "*T K"], expand: Sequence[Float[Array, "M R _"]]
) -> list[Float[Array, "*T R"]]:
    """The part of each projection in the product with `shrink`."""
    parts, start = [], 0
    for matrices in expand:
        parts.append(h[..., start : start + matrices.shape[-2]])
        start += matrices.shape[-2]
    return parts
