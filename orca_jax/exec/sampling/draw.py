"""The next token of each sampling row.

A row's token depends on its logits, parameters, seed and position alone, never on the other rows of the batch or on the
number of shards. Each row has its own key, `fold_in(key(seed), position)`, and draws one uniform number. The inverse of
the cumulative probability turns it into a token. Rows with temperature 0 take the most probable token, and a batch of
only such rows computes nothing else.

Naive samplers are slow because they sort 50,000 logits. Nearly every nucleus lies within the `_WINDOW` most probable
tokens, found quickly by `top_k`. Only a batch with a row of wider choice needs the exact search over all tokens: a
bisection for a threshold, without a sort.

Each shard works on its own columns. `shards.py` lists the few numbers that shards exchange.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from orca_jax.exec.sampling.fields import SamplingParameters
from orca_jax.exec.sampling.shards import VocabularyShards
from orca_jax.model.sharding import TENSOR_AXIS
from orca_jax.model.sharding import VOCAB_BLOCK as BLOCK

_WINDOW = 256


type Kind = Literal["plain", "greedy", "unfiltered"]
"""Draws of a batch: of any kind; none (greedy); among all tokens, without top-k, top-p and min-p."""


def sample(
    logits: Float[Array, "B V"],
    parameters: SamplingParameters,
    *,
    vocab_size: int,
    mesh: Mesh,
    kind: Kind = "plain",
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Draw a token for each row.

    Filters act as in Hugging Face's generate(): temperature, then top-k, then top-p on the renormalised rest, then
    min-p. Tokens tied with the last kept one are kept too.

    Args:
        logits: sharded over the vocabulary; the columns from `vocab_size` on are padding and are never drawn.
        parameters: of each row.
        vocab_size: the number of tokens.
        mesh: with a tensor axis. Each of its devices has a multiple of 128 columns.
        kind: draws of all rows; the program supports no others.

    Returns:
        Token ids, and True for each row with finite logits only. The id of another row has no meaning.
    """

    shards = VocabularyShards(vocab_size, TENSOR_AXIS)

    def on_shard(
        logits: Float[Array, "B N"], parameters: SamplingParameters
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
        finite = shards.all_finite(logits)
        return choose(shards.without_padding(logits), parameters, shards, kind), finite

    over_vocabulary = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(PartitionSpec(None, TENSOR_AXIS), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,  # every shard computes the same tokens from gathered values
    )
    tokens, finite = over_vocabulary(logits, parameters)
    return tokens, finite


def choose(
    logits: Float[Array, "B N"], parameters: SamplingParameters, shards: VocabularyShards, kind: Kind = "plain"
) -> Int[Array, " B"]:
    """A token for each row, from N of the columns; minus infinity is never drawn."""
    greedy, overall = shards.most_probable(logits)
    if kind == "greedy":
        return greedy

    def draw() -> Int[Array, " B"]:
        scaled = (logits - overall[:, None]) / jnp.maximum(parameters.temperature, 1e-6)[:, None]
        # A small vocabulary lies within the window, and every kind draws there.
        is_unfiltered = kind == "unfiltered" and shards.num_columns > _WINDOW
        drawn = (_draw_unfiltered if is_unfiltered else _draw)(scaled, parameters, shards)
        return jnp.where(parameters.temperature > 0, drawn, greedy)

    if kind == "unfiltered":
        return draw()
    return lax.cond(jnp.any(parameters.temperature > 0), draw, lambda: greedy)


class _Filters(NamedTuple):
    """The filters of each row's tokens."""

    top_k: Int[Array, " B"]  # no more than there are columns
    top_p: Float[Array, " B"]
    least: Float[Array, " B"]  # the least logit over temperature, relative to the largest: min-p


def _draw(scaled: Float[Array, "B N"], parameters: SamplingParameters, shards: VocabularyShards) -> Int[Array, " B"]:
    """Draw from the filtered distribution of each row; `scaled` are logits over temperature, at most 0."""
    uniform = _uniforms(parameters)
    most = shards.num_columns
    top_k = jnp.where(parameters.top_k == 0, most, jnp.minimum(parameters.top_k, most))
    filters = _Filters(top_k, parameters.top_p, jnp.log(parameters.min_p))
    mass = jnp.exp(scaled)
    windowed, fits = _draw_in_window(scaled, shards.total(mass), filters, uniform, shards)
    is_wide = ~fits & (parameters.temperature > 0)
    wide = partial(_draw_from_all, scaled, mass, filters, uniform, is_wide, shards)
    return lax.cond(jnp.any(is_wide), lambda: jnp.where(fits, windowed, wide()), lambda: windowed)


def _draw_unfiltered(
    scaled: Float[Array, "B N"], parameters: SamplingParameters, shards: VocabularyShards
) -> Int[Array, " B"]:
    """`_draw` for rows without filters."""
    return _pick_from_all(jnp.exp(scaled), _uniforms(parameters), shards)


def _uniforms(parameters: SamplingParameters) -> Float[Array, " B"]:
    return jax.vmap(_uniform)(parameters.seed_high, parameters.seed_low, parameters.position)


def _uniform(seed_high: Int[Array, ""], seed_low: Int[Array, ""], position: Int[Array, ""]) -> Float[Array, ""]:
    """A number in [0, 1), a function of seed and position alone."""
    words = lax.bitcast_convert_type(jnp.stack([seed_high, seed_low]), jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def _draw_in_window(
    scaled: Float[Array, "B N"],
    total: Float[Array, " B"],
    filters: _Filters,
    uniform: Float[Array, " B"],
    shards: VocabularyShards,
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Draw among the most probable tokens. The second result is True for rows without any other candidates."""
    window = min(_WINDOW, shards.num_columns)
    top_k, top_p, least = filters
    values, tokens = shards.candidates(scaled, window)
    mass = jnp.where(jnp.arange(window) < top_k[:, None], jnp.exp(values), 0.0)
    upto = _cumulative(mass)
    available = jnp.where(top_k <= window, upto[:, -1], total)
    kept = jnp.where((upto - mass < (top_p * available)[:, None]) & (values >= least[:, None]), mass, 0.0)
    # Three filters may end the choice within the window. The nucleus after a wider top-k is not known here.
    nucleus_known = (top_k == shards.num_columns) | (top_p >= 1)
    # The minimum, not `values[:, -1]`: XLA would merge this slice with the one in top_k and then sort all columns.
    ends = ((upto[:, -1] >= top_p * available) & (top_p < 1)) | (values.min(axis=-1) < least)
    choice = _pick(kept, _cumulative(kept), uniform * kept.sum(axis=-1))
    return jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0], (top_k <= window) | (nucleus_known & ends)


def _draw_from_all(
    scaled: Float[Array, "B N"],
    mass: Float[Array, "B N"],
    filters: _Filters,
    uniform: Float[Array, " B"],
    is_wide: Bool[Array, " B"],
    shards: VocabularyShards,
) -> Int[Array, " B"]:
    """Draw among all tokens, for the rows in `is_wide`. The most common case, without filters, needs no threshold."""
    top_k, top_p, least = filters
    rank = _ordered(scaled)

    def most_probable() -> Float[Array, "B N"]:
        least_rank = _threshold(top_k.shape, lambda middle: shards.count(rank >= middle[:, None]) >= top_k)
        return jnp.where(rank >= least_rank[:, None], mass, 0.0)

    kept = lax.cond(jnp.any(is_wide & (top_k < shards.num_columns)), most_probable, lambda: mass)

    def nucleus() -> Float[Array, "B N"]:
        need = top_p * shards.total(kept)

        def is_enough(least_rank: Int[Array, " B"]) -> Bool[Array, " B"]:
            return shards.total(jnp.where(rank >= least_rank[:, None], kept, 0.0)) >= need

        least_rank = _threshold(top_k.shape, is_enough)
        return jnp.where((rank >= least_rank[:, None]) | (top_p >= 1)[:, None], kept, 0.0)

    kept = lax.cond(jnp.any(is_wide & (top_p < 1)), nucleus, lambda: kept)
    return _pick_from_all(jnp.where(scaled >= least[:, None], kept, 0.0), uniform, shards)


def _pick_from_all(
    kept: Float[Array, "B N"], uniform: Float[Array, " B"], shards: VocabularyShards
) -> Int[Array, " B"]:
    """The first token with a cumulative mass above the share `uniform` of all mass."""
    # Two short cumulative sums instead of a long one: first the block, on all shards, then the token in it, on its own.
    block_mass = shards.block_masses(kept)
    upto = _cumulative(block_mass)
    target = uniform * upto[:, -1]
    block = _pick(block_mass, upto, target)
    before = jnp.take_along_axis(upto - block_mass, block[:, None], axis=-1)[:, 0]
    blocks = kept.reshape(kept.shape[0], -1, BLOCK)
    here = block - shards.first_column(kept) // BLOCK
    is_here = (here >= 0) & (here < blocks.shape[1])
    within = jnp.take_along_axis(blocks, jnp.where(is_here, here, 0)[:, None, None], axis=1)[:, 0]
    column = _pick(within, _cumulative(within), target - before)
    return shards.from_owner(block * BLOCK + column, is_here)


def _cumulative(mass: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Cumulative sums by a triangular matrix: XLA:CPU takes seconds to compile `jnp.cumsum`."""
    upto = jnp.triu(jnp.ones((mass.shape[1], mass.shape[1]), mass.dtype))
    return jnp.matmul(mass, upto, precision=lax.Precision.HIGHEST)


def _pick(mass: Float[Array, "B N"], upto: Float[Array, "B N"], target: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first column with a cumulative mass above the target, or the last column with mass."""
    column = lax.broadcasted_iota(jnp.int32, mass.shape, 1)
    first = jnp.where((mass > 0) & (upto > target[:, None]), column, mass.shape[1]).min(axis=-1)
    last = jnp.where(mass > 0, column, 0).max(axis=-1)
    return jnp.minimum(first, last)


def _ordered(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Map numbers to integers of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _threshold(rows: tuple[int, ...], is_enough: Callable[[Int[Array, " B"]], Bool[Array, " B"]]) -> Int[Array, " B"]:
    """The largest rank of each row for which `is_enough` is true, by bisection of its 32 bits.

    `is_enough(rank)` is true if the columns of this rank and above hold enough.
    """

    def halve(_: object, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # enough at `low`, not at `high`
        middle = (low & high) + ((low ^ high) >> 1)  # mean without overflow
        enough = is_enough(middle)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    bounds = (jnp.full(rows, jnp.iinfo(jnp.int32).min), jnp.full(rows, jnp.iinfo(jnp.int32).max))
    return lax.fori_loop(0, 32, halve, bounds)[0]
