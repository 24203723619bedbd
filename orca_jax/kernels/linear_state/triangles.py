"""Products and inverses of triangles for chunks of linear attention on a TPU.

The inverse of a triangle is found by substitution in blocks of `BLOCK` rows, all of them side by side in the lanes, and
pairs of blocks are joined by products: the powers of a triangle lose all digits if keys are similar. Functions with
products are generators: heads take turns after each one.
"""

from collections.abc import Generator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.linear_state.halves import HalfPair, halves

CHUNK = 128  # C: as many as lanes
BLOCK = 16  # rows of a triangle that are solved one by one


def joined(a: HalfPair, b: HalfPair, axis: int) -> HalfPair:
    """Two factors in one."""
    return HalfPair(*(jnp.concatenate(pair, axis=axis) for pair in zip(a, b, strict=True)))


def product(a: HalfPair, b: HalfPair) -> Float[Array, "M N"]:
    """The product of halves as one along an axis of three parts: a matrix unit adds them up."""
    wide = jnp.concatenate([a.high, a.high, a.low], axis=1)
    high = jnp.concatenate([b.low, b.high, b.high], axis=0)
    return jnp.dot(wide, high, preferred_element_type=jnp.float32)


def inverse(triangle: Float[Array, "C C"]) -> Generator[None, None, HalfPair]:
    """The inverse of a triangle whose diagonal is 1; `triangle` has what is below it."""
    row, column = square(CHUNK)
    lane = lax.rem(column, BLOCK)
    of_lane = lax.div(column, BLOCK)
    # The blocks on the diagonal, side by side: [BLOCK, C]
    blocks = triangle[:BLOCK]
    for block in range(1, CHUNK // BLOCK):
        own = triangle[block * BLOCK : (block + 1) * BLOCK]
        blocks = jnp.where(of_lane == block, own, blocks)
    found = jnp.where(row[:BLOCK] == lane, 1.0, 0.0)
    for index in range(BLOCK - 1):
        # The column `index` of each block, in all lanes of the block.
        place = jnp.broadcast_to(column - lane + index, blocks.shape)
        factors = jnp.take_along_axis(blocks, place, axis=1)
        found -= factors * found[index : index + 1]
        yield
    whole = [jnp.where(of_lane == block, found, 0.0) for block in range(CHUNK // BLOCK)]
    size = BLOCK
    while size < CHUNK:
        whole = yield from _doubled(triangle, whole, size)
        size *= 2
    return halves(jnp.concatenate(whole))


def _doubled(
    triangle: Float[Array, "C C"], inverse: list[Float[Array, "S C"]], size: int
) -> Generator[None, None, list[Float[Array, "2S C"]]]:
    """The inverses of blocks twice as large, by rows: what is new is in the lower halves of their rows.

    Args:
        triangle: the numbers below the diagonal.
        inverse: the inverses of blocks of `size` rows, each in its lanes.
        size: S.
    """
    _, column = square(CHUNK)
    lower = range(1, len(inverse), 2)
    below = [
        jnp.where(
            lax.div(column, size) == block - 1, triangle[block * size : (block + 1) * size], 0.0
        )
        for block in lower
    ]
    passed = product(halves(jnp.concatenate(below)), halves(jnp.concatenate(inverse)))
    yield
    zeros = jnp.zeros((size, CHUNK), jnp.float32)
    parts: list[Array] = []
    for index in range(len(lower)):
        parts += [zeros, passed[index * size : (index + 1) * size]]
    own = halves(jnp.concatenate([inverse[block] for block in lower]))
    found = product(own, halves(jnp.concatenate(parts)))
    yield
    return [
        jnp.concatenate(
            [inverse[block - 1], inverse[block] - found[index * size : (index + 1) * size]]
        )
        for index, block in enumerate(lower)
    ]


def square(size: int) -> tuple[Int[Array, "C 1"], Int[Array, "1 C"]]:
    """The rows and the columns of a square."""
    return (
        lax.broadcasted_iota(jnp.int32, (size, 1), 0),
        lax.broadcasted_iota(jnp.int32, (1, size), 1),
    )
