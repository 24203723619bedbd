"""The next token of each sampling row.

A row's token depends on its logits, parameters, seed and position alone, never on the other rows of the batch or on the
number of shards. Each row has its own key, `fold_in(key(seed), position)`, and draws one uniform number. The inverse of
the cumulative probability turns it into a token. Rows with temperature 0 take the most probable token, and a batch of
only these rows computes nothing else.

Naive samplers are slow because they sort 50,000 logits. Nearly every nucleus lies within the `WINDOW` most probable
tokens, found quickly by `top_k`. Only a batch with a row of wider choice needs the exact search over all tokens: a
bisection for a threshold, without a sort.

The vocabulary is sharded over a mesh axis, and no shard ever holds a row of all columns. Shards exchange maxima, the
most probable tokens of each shard, and the mass of each 128 columns: 1.6 kB of a row of 50,257 tokens, instead of 201
kB. The token does not depend on the number of shards. Sums are therefore taken in two steps: within each block of 128
columns, which lies on one shard, and over the blocks of all shards, in the order of the vocabulary.

A GPU asks its host at each branch, and its `top_k` sorts all columns. There the kind "filtered" computes the exact
search for every batch, in eight passes, and takes the window from the blocks with the largest maxima.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from orca_jax.exec.rows import SamplingParameters
from orca_jax.exec.sampling.search import largest, threshold_in_passes
from orca_jax.model.sharding import TENSOR_AXIS, VOCAB_BLOCK
from orca_jax.values.cache_spec import ceil_div

WINDOW = 256

type Kind = Literal["plain", "greedy", "unfiltered", "filtered"]
"""Draws of a batch: of any kind; none (greedy); among all tokens, without top-k, top-p and min-p; each top-k within
the window. The programs of the last three have no branch."""


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
        parameters: the sampling parameters of each row.
        vocab_size: the number of tokens.
        mesh: a mesh with a tensor axis. Each of its devices has a multiple of 128 columns.
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
        return ceil_div(self.vocab_size, VOCAB_BLOCK)

    @property
    def num_columns(self) -> int:
        """Columns of the blocks with tokens."""
        return self.num_blocks * VOCAB_BLOCK

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

    def most_probable(
        self, logits: Float[Array, "B N"]
    ) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
        """The first of the most probable tokens of each row, and its logit."""
        top, column = _first_maximum(logits)
        overall = lax.pmax(top, self.axis)
        token = jnp.where(top == overall, self.first_column(logits) + column, self.vocab_size - 1)
        return lax.pmin(token, self.axis), overall

    def candidates(
        self, logits: Float[Array, "B N"], count: int, *, by_blocks: bool = False
    ) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
        """The largest values of each row with their tokens, in descending order; among equals the lower token first.

        `count` is C, at most `num_columns`. `by_blocks`: see `largest`.
        """
        find = largest if by_blocks else lax.top_k
        values, columns = find(logits, min(count, logits.shape[1]))
        if lax.axis_size(self.axis) == 1:
            return values, columns
        tokens = self.first_column(logits) + columns
        values, tokens = (
            lax.all_gather(each, self.axis, axis=1, tiled=True) for each in (values, tokens)
        )
        # among equals the lower token, since shards are in order
        values, indices = lax.top_k(values, count)
        return values, jnp.take_along_axis(tokens, indices, axis=1)

    def block_masses(self, mass: Float[Array, "B N"]) -> Float[Array, "B M"]:
        """The sum of each block with tokens, on all shards; M is `num_blocks`."""
        return self._of_all_shards(_sums_of_blocks(mass))

    def _of_all_shards(self, blocks: Float[Array, "*S N"]) -> Float[Array, "*S M"]:
        axis = blocks.ndim - 1
        gathered = lax.all_gather(blocks, self.axis, axis=axis, tiled=True)[..., : self.num_blocks]
        # On one shard XLA would otherwise sum all columns at once, in another order.
        return lax.optimization_barrier(gathered)

    def total(self, mass: Float[Array, "B N"]) -> Float[Array, " B"]:
        """The sum of each row."""
        return self.block_masses(mass).sum(axis=-1)

    def totals(self, masses: Iterable[Float[Array, "B N"]]) -> Float[Array, "S B"]:
        """`total` of each, with one exchange."""
        blocks = jnp.stack([_sums_of_blocks(mass) for mass in masses])
        return self._of_all_shards(blocks).sum(axis=-1)

    def count(self, is_counted: Bool[Array, "B N"]) -> Int[Array, " B"]:
        """The number of true columns of each row."""
        # Integers below 2**24 are exact in float32, and XLA:CPU adds them faster than converted booleans.
        return lax.psum(jnp.where(is_counted, 1.0, 0.0).sum(axis=-1), self.axis).astype(jnp.int32)

    def from_owner(self, value: Int[Array, " B"], is_owner: Bool[Array, " B"]) -> Int[Array, " B"]:
        """The value of the one shard with `is_owner`, for each row; it is not negative."""
        return lax.pmax(jnp.where(is_owner, value, 0), self.axis)


def choose(
    logits: Float[Array, "B N"],
    parameters: SamplingParameters,
    shards: VocabularyShards,
    kind: Kind = "plain",
) -> Int[Array, " B"]:
    """A token for each row, from N of the columns; minus infinity is never drawn."""
    greedy, overall = shards.most_probable(logits)
    if kind == "greedy":
        return greedy

    def draw() -> Int[Array, " B"]:
        scaled = _over_temperature(logits, overall, parameters)
        # A small vocabulary lies within the window, and every kind draws there.
        is_unfiltered = kind == "unfiltered" and shards.num_columns > WINDOW
        if is_unfiltered:
            drawn = _draw_unfiltered(scaled, parameters, shards)
        else:
            drawn = _draw(scaled, parameters, shards, has_branches=kind == "plain")
        return jnp.where(parameters.temperature > 0, drawn, greedy)

    if kind != "plain":
        return draw()
    return lax.cond(jnp.any(parameters.temperature > 0), draw, lambda: greedy)


def without_filtered(
    logits: Float[Array, "B N"],
    drawn: Int[Array, " B"],
    parameters: SamplingParameters,
    shards: VocabularyShards,
) -> Float[Array, "B N"]:
    """Logits over temperature, with minus infinity for the tokens that filters leave out.

    Rows with temperature 0 are as they were.

    Args:
        logits: of this shard.
        drawn: tokens that were drawn and so are never left out, whatever rounding says; -1: none.
        parameters: temperatures and filters.
        shards: the parts of the columns.
    """
    _, overall = shards.most_probable(logits)
    scaled = _over_temperature(logits, overall, parameters)
    draws = parameters.temperature > 0
    kept = _kept(scaled, jnp.exp(scaled), _filters(parameters, shards), draws, shards)
    column = shards.first_column(logits) + jnp.arange(logits.shape[1])
    kept |= (column == drawn[:, None]) | ~draws[:, None]
    temperature = jnp.where(draws, parameters.temperature, 1.0)
    return jnp.where(kept, logits / temperature[:, None], -jnp.inf)


def _over_temperature(
    logits: Float[Array, "B N"], overall: Float[Array, " B"], parameters: SamplingParameters
) -> Float[Array, "B N"]:
    """Logits relative to the largest one of their row, over temperature."""
    return (logits - overall[:, None]) / jnp.maximum(parameters.temperature, 1e-6)[:, None]


class _Filters(NamedTuple):
    """The filters of each row's tokens."""

    top_k: Int[Array, " B"]  # no more than there are columns
    top_p: Float[Array, " B"]
    least: Float[Array, " B"]  # the least logit over temperature, relative to the largest: min-p


def _filters(parameters: SamplingParameters, shards: VocabularyShards) -> _Filters:
    most = shards.num_columns
    top_k = jnp.where(parameters.top_k == 0, most, jnp.minimum(parameters.top_k, most))
    return _Filters(top_k, parameters.top_p, jnp.log(parameters.min_p))


def _draw(
    scaled: Float[Array, "B N"],
    parameters: SamplingParameters,
    shards: VocabularyShards,
    *,
    has_branches: bool,
) -> Int[Array, " B"]:
    """Draw from the filtered distribution of each row; `scaled` are logits over temperature, at most 0."""
    uniform = _uniforms(parameters)
    filters = _filters(parameters, shards)
    mass = jnp.exp(scaled)
    window = min(WINDOW, shards.num_columns)
    found = shards.candidates(scaled, window, by_blocks=not has_branches)
    windowed, fits = _draw_in_window(found, shards.total(mass), filters, uniform, shards)
    if not has_branches:
        kept = _nucleus(_ordered(scaled), mass, filters, shards, in_passes=True)
        kept &= scaled >= filters.least[:, None]
        wide = _pick_from_all(jnp.where(kept, mass, 0.0), uniform, shards)
        return jnp.where(fits, windowed, wide)
    is_wide = ~fits & (parameters.temperature > 0)
    draw = partial(_draw_from_all, scaled, mass, filters, uniform, is_wide, shards)
    return lax.cond(jnp.any(is_wide), lambda: jnp.where(fits, windowed, draw()), lambda: windowed)


def _draw_unfiltered(
    scaled: Float[Array, "B N"], parameters: SamplingParameters, shards: VocabularyShards
) -> Int[Array, " B"]:
    """`_draw` for rows without filters."""
    return _pick_from_all(jnp.exp(scaled), _uniforms(parameters), shards)


def _uniforms(parameters: SamplingParameters) -> Float[Array, " B"]:
    return jax.vmap(_uniform)(parameters.seed_high, parameters.seed_low, parameters.position)


def _uniform(
    seed_high: Int[Array, ""], seed_low: Int[Array, ""], position: Int[Array, ""]
) -> Float[Array, ""]:
    """A number in [0, 1), a function of seed and position alone."""
    words = lax.bitcast_convert_type(jnp.stack([seed_high, seed_low]), jnp.uint32)
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def _draw_in_window(
    found: tuple[Float[Array, "B C"], Int[Array, "B C"]],
    total: Float[Array, " B"],
    filters: _Filters,
    uniform: Float[Array, " B"],
    shards: VocabularyShards,
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Draw among the most probable tokens. The second result is True for rows without any other candidates."""
    top_k, top_p, least = filters
    values, tokens = found
    window = values.shape[1]
    mass = jnp.where(jnp.arange(window) < top_k[:, None], jnp.exp(values), 0.0)
    upto = _cumulative(mass)
    available = jnp.where(top_k <= window, upto[:, -1], total)
    kept = jnp.where(
        (upto - mass < (top_p * available)[:, None]) & (values >= least[:, None]), mass, 0.0
    )
    # Three filters may end the choice within the window. The nucleus after a wider top-k is not known here.
    nucleus_known = (top_k == shards.num_columns) | (top_p >= 1)
    # The minimum, not `values[:, -1]`: XLA would merge this slice with the one in top_k and then sort all columns.
    ends = ((upto[:, -1] >= top_p * available) & (top_p < 1)) | (values.min(axis=-1) < least)
    choice = _pick(kept, _cumulative(kept), uniform * kept.sum(axis=-1))
    return jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0], (top_k <= window) | (
        nucleus_known & ends
    )


def _draw_from_all(
    scaled: Float[Array, "B N"],
    mass: Float[Array, "B N"],
    filters: _Filters,
    uniform: Float[Array, " B"],
    is_wide: Bool[Array, " B"],
    shards: VocabularyShards,
) -> Int[Array, " B"]:
    """Draw among all tokens, for the rows in `is_wide`. The most common case, without filters, needs no threshold."""
    kept = _kept(scaled, mass, filters, is_wide, shards)
    return _pick_from_all(jnp.where(kept, mass, 0.0), uniform, shards)


def _kept(
    scaled: Float[Array, "B N"],
    mass: Float[Array, "B N"],
    filters: _Filters,
    counts: Bool[Array, " B"],
    shards: VocabularyShards,
) -> Bool[Array, "B N"]:
    """The tokens that pass the filters, for the rows in `counts`; those of other rows have no meaning."""
    top_k, top_p, least = filters
    rank = _ordered(scaled)
    everything = jnp.ones(rank.shape, bool)

    def most_probable() -> Bool[Array, "B N"]:
        least_rank = _threshold(
            top_k.shape, lambda middle: shards.count(rank >= middle[:, None]) >= top_k
        )
        return rank >= least_rank[:, None]

    has_top_k = jnp.any(counts & (top_k < shards.num_columns))
    within = lax.cond(has_top_k, most_probable, lambda: everything)

    def nucleus() -> Bool[Array, "B N"]:
        return _nucleus(rank, jnp.where(within, mass, 0.0), filters, shards)

    within &= lax.cond(jnp.any(counts & (top_p < 1)), nucleus, lambda: everything)
    return within & (scaled >= least[:, None])


def _nucleus(
    rank: Int[Array, "B N"],
    mass: Float[Array, "B N"],
    filters: _Filters,
    shards: VocabularyShards,
    *,
    in_passes: bool = False,
) -> Bool[Array, "B N"]:
    """The most probable tokens of each row with the share `top_p` of its mass.

    `in_passes`: by `threshold_in_passes`, without a loop.
    """
    need = filters.top_p * shards.total(mass)

    def from_rank(least_rank: Int[Array, " B"]) -> Float[Array, "B N"]:
        return jnp.where(rank >= least_rank[:, None], mass, 0.0)

    if in_passes:
        least_rank = threshold_in_passes(
            need.shape, lambda ranks: shards.totals(map(from_rank, ranks)) >= need
        )
    else:
        least_rank = _threshold(need.shape, lambda middle: shards.total(from_rank(middle)) >= need)
    return (rank >= least_rank[:, None]) | (filters.top_p >= 1)[:, None]


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
    blocks = kept.reshape(kept.shape[0], -1, VOCAB_BLOCK)
    here = block - shards.first_column(kept) // VOCAB_BLOCK
    is_here = (here >= 0) & (here < blocks.shape[1])
    within = jnp.take_along_axis(blocks, jnp.where(is_here, here, 0)[:, None, None], axis=1)[:, 0]
    column = _pick(within, _cumulative(within), target - before)
    return shards.from_owner(block * VOCAB_BLOCK + column, is_here)


def _cumulative(mass: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Cumulative sums by a triangular matrix: XLA:CPU takes seconds to compile `jnp.cumsum`."""
    upto = jnp.triu(jnp.ones((mass.shape[1], mass.shape[1]), mass.dtype))
    return jnp.matmul(mass, upto, precision=lax.Precision.HIGHEST)


def _pick(
    mass: Float[Array, "B N"], upto: Float[Array, "B N"], target: Float[Array, " B"]
) -> Int[Array, " B"]:
    """The first column with a cumulative mass above the target, or the last column with mass."""
    column = lax.broadcasted_iota(jnp.int32, mass.shape, 1)
    first = jnp.where((mass > 0) & (upto > target[:, None]), column, mass.shape[1]).min(axis=-1)
    last = jnp.where(mass > 0, column, 0).max(axis=-1)
    return jnp.minimum(first, last)


def _ordered(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Map numbers to integers of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))


def _threshold(
    rows: tuple[int, ...], is_enough: Callable[[Int[Array, " B"]], Bool[Array, " B"]]
) -> Int[Array, " B"]:
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


def _sums_of_blocks(mass: Float[Array, "B N"]) -> Float[Array, "B M"]:
    return mass.reshape(mass.shape[0], -1, VOCAB_BLOCK).sum(axis=-1)


def _first_maximum(logits: Float[Array, "B N"]) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """The maximum of each row and its first column, in two steps: XLA:CPU vectorises a maximum, but not an argmax.

    Rows with NaN get an arbitrary column.
    """
    blocks = logits.reshape(logits.shape[0], -1, VOCAB_BLOCK)
    block_top = blocks.max(axis=-1)
    top = block_top.max(axis=-1)
    block = _first(block_top == top[:, None])
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return top, block * VOCAB_BLOCK + _first(within == top[:, None])


def _first(where: Bool[Array, "B N"]) -> Int[Array, " B"]:
    """The first true column, or the last column if none is true."""
    column = lax.broadcasted_iota(jnp.int32, where.shape, 1)
    return jnp.where(where, column, where.shape[1] - 1).min(axis=-1)
