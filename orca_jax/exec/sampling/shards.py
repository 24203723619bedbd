"""The vocabulary, sharded over a mesh axis: maxima, sums and candidates of all shards.

Every function here runs on one shard, with N of the columns. No shard ever holds a row of all columns. It receives
maxima, the most probable tokens of each shard, and the mass of each block of 128 columns: 1.6 kB of a row of 50,257
tokens, instead of 201 kB.

The results do not depend on the number of shards, to the last bit. Sums are therefore taken in two steps: within each
block, which lies on one shard, and over the blocks of all shards, in the order of the vocabulary.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from orca_jax.model.sharding import VOCAB_BLOCK as BLOCK


@dataclass(frozen=True)
class VocabularyShards:
    """The columns of logits on a mesh axis. Each shard has the same number of whole blocks.

    Attributes:
        vocab_size: the number of tokens; the columns after them are padding.
        axis: the mesh axis.
    """

    vocab_size: int
    axis: str

    @property
    def num_blocks(self) -> int:
        """Blocks with tokens, on all shards. Blocks of padding depend on the number of shards and count nowhere."""
        return -(-self.vocab_size // BLOCK)

    @property
    def num_columns(self) -> int:
        """Columns of the blocks with tokens."""
        return self.num_blocks * BLOCK

    def first_column(self, logits: Float[Array, "B N"]) -> Int[Array, ""]:
        """The token of this shard's first column."""
        return lax.axis_index(self.axis) * logits.shape[1]

    def all_finite(self, logits: Float[Array, "B N"]) -> Bool[Array, " B"]:
        """True for each row with finite logits only, on all shards."""
        return lax.pmin(jnp.isfinite(logits).all(axis=-1).astype(jnp.int32), self.axis) > 0

    def without_padding(self, logits: Float[Array, "B N"]) -> Float[Array, "B N"]:
        """The logits with minus infinity in the columns of padding."""
        column = self.first_column(logits) + jnp.arange(logits.shape[1])
        return jnp.where(column < self.vocab_size, logits, -jnp.inf)

    def most_probable(self, logits: Float[Array, "B N"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """The first of the most probable tokens of each row, and its logit."""
        top, column = _first_maximum(logits)
        overall = lax.pmax(top, self.axis)
        token = jnp.where(top == overall, self.first_column(logits) + column, self.vocab_size - 1)
        return lax.pmin(token, self.axis), overall

    def candidates(self, logits: Float[Array, "B N"], count: int) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
        """The largest values of each row with their tokens, in descending order; among equals the lower token first.

        `count` is C, at most `num_columns`.
        """
        values, columns = lax.top_k(logits, min(count, logits.shape[1]))
        if lax.axis_size(self.axis) == 1:
            return values, columns
        tokens = self.first_column(logits) + columns
        values, tokens = (lax.all_gather(each, self.axis, axis=1, tiled=True) for each in (values, tokens))
        values, indices = lax.top_k(values, count)  # among equals the lower token, since shards are in order
        return values, jnp.take_along_axis(tokens, indices, axis=1)

    def block_masses(self, mass: Float[Array, "B N"]) -> Float[Array, "B M"]:
        """The sum of each block with tokens, on all shards; M is `num_blocks`."""
        blocks = mass.reshape(mass.shape[0], -1, BLOCK).sum(axis=-1)
        gathered = lax.all_gather(blocks, self.axis, axis=1, tiled=True)[:, : self.num_blocks]
        # On one shard XLA would otherwise sum all columns at once, in another order.
        return lax.optimization_barrier(gathered)

    def total(self, mass: Float[Array, "B N"]) -> Float[Array, " B"]:
        """The sum of each row."""
        return self.block_masses(mass).sum(axis=-1)

    def count(self, is_counted: Bool[Array, "B N"]) -> Int[Array, " B"]:
        """The number of true columns of each row."""
        # Integers below 2**24 are exact in float32, and XLA:CPU adds them faster than converted booleans.
        return lax.psum(jnp.where(is_counted, 1.0, 0.0).sum(axis=-1), self.axis).astype(jnp.int32)

    def from_owner(self, value: Int[Array, " B"], is_owner: Bool[Array, " B"]) -> Int[Array, " B"]:
        """The value of the one shard with `is_owner`, for each row; it is not negative."""
        return lax.pmax(jnp.where(is_owner, value, 0), self.axis)


def _first_maximum(logits: Float[Array, "B N"]) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """The maximum of each row and its first column, in two steps: XLA:CPU vectorises a maximum, but not an argmax.

    Rows with NaN get an arbitrary column.
    """
    blocks = logits.reshape(logits.shape[0], -1, BLOCK)
    block_top = blocks.max(axis=-1)
    top = block_top.max(axis=-1)
    block = _first(block_top == top[:, None])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return top, block * BLOCK + _first(within == top[:, None])


def _first(where: Bool[Array, "B N"]) -> Int[Array, " B"]:
    """The first true column, or the last column if none is true."""
    column = lax.broadcasted_iota(jnp.int32, where.shape, 1)
    return jnp.where(where, column, where.shape[1] - 1).min(axis=-1)
