"""The next token of each sampling row.

A row's token depends on its logits, parameters, seed and position alone, never on who shares its batch: each row has
its own key, `fold_in(key(seed), position)`, and draws one uniform number, which picks a token by the inverse of the
cumulative probability. Rows with temperature 0 take the most probable token, and a batch of only such rows
pays for nothing else.

Sorting 50,000 logits is what makes naive samplers slow. Nearly every nucleus lies within the `_WINDOW` most probable
tokens, which `top_k` finds quickly; only a batch with a row whose choice is wider pays for the exact search
over all tokens, which bisects for a threshold and sorts nothing.
"""

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from orca_jax.exec.sampling.fields import SamplingParameters
from orca_jax.model.sharding import TENSOR_AXIS

_WINDOW = 256
_BLOCK = 128  # the padded vocabulary is a multiple of it


type Kind = Literal["plain", "greedy", "unfiltered"]
"""What a batch may ask for: anything; no draws at all; draws among all tokens, without top-k, top-p and min-p."""


def sample(
    logits: Float[Array, "B V"],
    parameters: SamplingParameters,
    *,
    vocab_size: int,
    mesh: Mesh,
    kind: Kind = "plain",
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Draw a token for each row.

    Filters act as in Hugging Face's generate(): temperature, then top-k, then top-p on what top-k left, renormalised,
    then min-p. Tokens tied with the last one kept are kept too.

    Args:
        logits: sharded over the vocabulary; the columns from `vocab_size` on are padding and are never drawn.
        parameters: of each row.
        vocab_size: tokens that exist.
        mesh: with a tensor axis that divides the columns.
        kind: nothing is compiled for rows that ask for more.

    Returns:
        Token ids, and whether all logits of the row were finite; where they were not, the id means nothing.
    """

    def on_shard(
        logits: Float[Array, "B N"], parameters: SamplingParameters
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
        finite = all_finite(logits, TENSOR_AXIS)
        logits = without_padding(logits, vocab_size, TENSOR_AXIS)
        return choose(logits, parameters, vocab_size=vocab_size, axis=TENSOR_AXIS, kind=kind), finite

    over_vocabulary = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(PartitionSpec(None, TENSOR_AXIS), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,  # every shard computes the same tokens from what it gathered
    )
    tokens, finite = over_vocabulary(logits, parameters)
    return tokens, finite


def all_finite(logits: Float[Array, "B N"], axis: str) -> Bool[Array, " B"]:
    """Whether all logits of a row are finite, on all shards."""
    return lax.pmin(jnp.isfinite(logits).all(axis=-1).astype(jnp.int32), axis) > 0


def without_padding(logits: Float[Array, "B N"], vocab_size: int, axis: str) -> Float[Array, "B N"]:
    """Nothing but minus infinity in the columns of tokens that do not exist."""
    column = first_column(logits, axis) + jnp.arange(logits.shape[1])
    return jnp.where(column < vocab_size, logits, -jnp.inf)


def first_column(logits: Float[Array, "B N"], axis: str) -> Int[Array, ""]:
    """The token of this shard's first column."""
    return lax.axis_index(axis) * logits.shape[1]


def choose(
    logits: Float[Array, "B N"], parameters: SamplingParameters, *, vocab_size: int, axis: str, kind: Kind = "plain"
) -> Int[Array, " B"]:
    """A token for each row, from N of the columns; minus infinity is never drawn.

    Only rows that are not greedy make the shards exchange more than a maximum.
    """
    greedy, overall = _most_probable(logits, vocab_size, axis)
    if kind == "greedy":
        return greedy

    def draw() -> Int[Array, " B"]:
        everything = lax.all_gather(logits, axis, axis=1, tiled=True)
        scaled = (everything - overall[:, None]) / jnp.maximum(parameters.temperature, 1e-6)[:, None]
        # Of few tokens the window holds all, and every kind draws there.
        is_unfiltered = kind == "unfiltered" and scaled.shape[1] > _WINDOW
        drawn = _draw_unfiltered(scaled, parameters) if is_unfiltered else _draw(scaled, parameters)
        return jnp.where(parameters.temperature > 0, drawn, greedy)

    if kind == "unfiltered":
        return draw()
    return lax.cond(jnp.any(parameters.temperature > 0), draw, lambda: greedy)


def _most_probable(
    logits: Float[Array, "B N"], vocab_size: int, axis: str
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """The first of the most probable tokens of each row, on all shards, and its logit."""
    top, place = _first_maximum(logits)
    overall = lax.pmax(top, axis)
    token = jnp.where(top == overall, first_column(logits, axis) + place, vocab_size - 1)
    return lax.pmin(token, axis), overall


def _first_maximum(logits: Float[Array, "B N"]) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """The maximum of each row and its first column, in two steps: XLA:CPU vectorises a maximum, but no argmax.

    Rows with NaN get some column.
    """
    width = math.gcd(logits.shape[1], _BLOCK)
    blocks = logits.reshape(logits.shape[0], -1, width)
    block_top = blocks.max(axis=-1)
    top = block_top.max(axis=-1)
    block = _first(block_top == top[:, None])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return top, block * width + _first(within == top[:, None])


def _first(where: Bool[Array, "B N"]) -> Int[Array, " B"]:
    """The first column that holds, or the last of all."""
    column = lax.broadcasted_iota(jnp.int32, where.shape, 1)
    return jnp.where(where, column, where.shape[1] - 1).min(axis=-1)


class _Filters(NamedTuple):
    """Which tokens of a row may be drawn."""

    top_k: Int[Array, " B"]  # no more than there are columns
    top_p: Float[Array, " B"]
    least: Float[Array, " B"]  # the least logit over temperature, relative to the largest: min-p


def _draw(scaled: Float[Array, "B V"], parameters: SamplingParameters) -> Int[Array, " B"]:
    """Draw from the filtered distribution of each row; `scaled` are logits over temperature, at most 0."""
    uniform = _uniforms(parameters)
    vocab = scaled.shape[1]
    top_k = jnp.where(parameters.top_k == 0, vocab, jnp.minimum(parameters.top_k, vocab))
    filters = _Filters(top_k, parameters.top_p, jnp.log(parameters.min_p))
    mass = jnp.exp(scaled)
    windowed, fits = _draw_in_window(scaled, mass.sum(axis=-1), filters, uniform)
    is_wide = ~fits & (parameters.temperature > 0)
    wide = partial(_draw_from_all, scaled, mass, filters, uniform, is_wide)
    return lax.cond(jnp.any(is_wide), lambda: jnp.where(fits, windowed, wide()), lambda: windowed)


def _draw_unfiltered(scaled: Float[Array, "B V"], parameters: SamplingParameters) -> Int[Array, " B"]:
    """`_draw` for rows without filters."""
    return _pick_from_all(jnp.exp(scaled), _uniforms(parameters))


def _uniforms(parameters: SamplingParameters) -> Float[Array, " B"]:
    return jax.vmap(_uniform)(parameters.seed_high, parameters.seed_low, parameters.position)


def _uniform(seed_high: Int[Array, ""], seed_low: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, ""]:
    """A number in [0, 1) that depends on seed and position alone."""
    words = lax.bitcast_convert_type(jnp.stack([seed_high, seed_low]), jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def _draw_in_window(
    scaled: Float[Array, "B V"], total: Float[Array, " B"], filters: _Filters, uniform: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Draw among the most probable tokens; the second result tells which rows choose among no others."""
    vocab = scaled.shape[1]
    window = min(_WINDOW, vocab)
    top_k, top_p, least = filters
    values, tokens = lax.top_k(scaled, window)
    mass = jnp.where(jnp.arange(window) < top_k[:, None], jnp.exp(values), 0.0)
    upto = _cumulative(mass)
    available = jnp.where(top_k <= window, upto[:, -1], total)
    kept = jnp.where((upto - mass < (top_p * available)[:, None]) & (values >= least[:, None]), mass, 0.0)
    # Three filters may end the choice within the window. A nucleus of what a wider top-k left is not known here.
    nucleus_known = (top_k == vocab) | (top_p >= 1)
    # The minimum and not `values[:, -1]`: XLA would merge that slice with top_k's own and then sort all columns.
    ends = ((upto[:, -1] >= top_p * available) & (top_p < 1)) | (values.min(axis=-1) < least)
    choice = _pick(kept, _cumulative(kept), uniform * kept.sum(axis=-1))
    return jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0], (top_k <= window) | (nucleus_known & ends)


def _draw_from_all(
    scaled: Float[Array, "B V"],
    mass: Float[Array, "B V"],
    filters: _Filters,
    uniform: Float[Array, " B"],
    is_wide: Bool[Array, " B"],
) -> Int[Array, " B"]:
    """Draw among all tokens, for the rows that have to; plain sampling, the most common case, needs no threshold."""
    top_k, top_p, least = filters
    rank = _ordered(scaled)

    def most_probable() -> Float[Array, "B V"]:
        return jnp.where(rank >= _threshold(rank, jnp.ones_like(mass), top_k.astype(jnp.float32))[:, None], mass, 0.0)

    kept = lax.cond(jnp.any(is_wide & (top_k < scaled.shape[1])), most_probable, lambda: mass)

    def nucleus() -> Float[Array, "B V"]:
        least_rank = _threshold(rank, kept, top_p * kept.sum(axis=-1))
        return jnp.where((rank >= least_rank[:, None]) | (top_p >= 1)[:, None], kept, 0.0)

    kept = lax.cond(jnp.any(is_wide & (top_p < 1)), nucleus, lambda: kept)
    return _pick_from_all(jnp.where(scaled >= least[:, None], kept, 0.0), uniform)


def _pick_from_all(kept: Float[Array, "B V"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The token at which the cumulative mass exceeds that share of all mass."""
    # Two short cumulative sums instead of a long one: first the block, then the token in it.
    blocks = kept.reshape(kept.shape[0], -1, _BLOCK)
    block_mass = blocks.sum(axis=-1)
    upto = _cumulative(block_mass)
    target = uniform * upto[:, -1]
    block = _pick(block_mass, upto, target)
    before = jnp.take_along_axis(upto - block_mass, block[:, None], axis=-1)[:, 0]
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _pick(within, _cumulative(within), target - before)


def _cumulative(mass: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Sums up to each place, by a triangular matrix: `jnp.cumsum` takes XLA:CPU seconds to compile."""
    upto = jnp.triu(jnp.ones((mass.shape[1], mass.shape[1]), mass.dtype))
    return jnp.matmul(mass, upto, precision=lax.Precision.HIGHEST)


def _pick(mass: Float[Array, "B N"], upto: Float[Array, "B N"], target: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first place whose cumulative mass exceeds the target, or the last; never one without mass."""
    place = lax.broadcasted_iota(jnp.int32, mass.shape, 1)
    first = jnp.where((mass > 0) & (upto > target[:, None]), place, mass.shape[1]).min(axis=-1)
    last = jnp.where(mass > 0, place, 0).max(axis=-1)
    return jnp.minimum(first, last)


def _ordered(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Integers in the order of the numbers."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _threshold(rank: Int[Array, "B V"], weight: Float[Array, "B V"], need: Float[Array, " B"]) -> Int[Array, " B"]:
    """The largest threshold whose tokens at or above it weigh at least `need`; bisects the 32 bits of `rank`."""

    def halve(_: object, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough weight at `low`, not at `high`
        middle = (low & high) + ((low ^ high) >> 1)  # mean without overflow
        enough = jnp.sum(jnp.where(rank >= middle[:, None], weight, 0.0), axis=-1) >= need
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rows = rank.shape[:1]
    bounds = (jnp.full(rows, jnp.iinfo(jnp.int32).min), jnp.full(rows, jnp.iinfo(jnp.int32).max))
    return lax.fori_loop(0, 32, halve, bounds)[0]
