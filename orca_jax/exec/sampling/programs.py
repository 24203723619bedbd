"""The samplers: programs from hidden vectors to tokens. Their number does not depend on the buckets.

Plain samplers exist for several widths, 8, 16, and so on, up to one place for each row. If the unembedding skips places
that are not in use, 1 and the largest width are enough. On a GPU there are two more kinds of them, without any branch.
The full sampler supports every sampling feature. It is compiled for the smallest and the largest width only, or for the
largest alone, and a launch without these features does not pay for them. The samplers are programs apart from the
layers, so the host can compute the masks of a grammar while the layers run. Their inputs beside hidden vectors are one
vector for every launch, and two more arrays for full samplers.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32
from numpy.typing import NDArray

from orca_jax.exec.layers import Weights
from orca_jax.exec.pack import Kept, VectorLayout
from orca_jax.exec.rows import (
    EXTRA_COLUMNS,
    PLAIN_COLUMNS,
    Column,
    Extras,
    RowTable,
    SamplingParameters,
)
from orca_jax.exec.sampling.adjust import WORD, Context, change_logits
from orca_jax.exec.sampling.draw import WINDOW, Kind, VocabularyShards, choose, sample
from orca_jax.exec.sampling.logprobs import TokenScores, no_scores, score
from orca_jax.model.layers import Table
from orca_jax.model.sharding import TENSOR_AXIS
from orca_jax.values.config import LogprobsMode
from orca_jax.values.platforms import Platform
from orca_jax.values.request import TokenSet

_LEAST_GROUP = 8  # places drawn at a time, if others are skipped
_GROUP_SCORES = 2**19  # those of more places, if the vocabulary is small


class Draws(NamedTuple):
    """The vector of one sampler, with a value of each field for each place."""

    row: Int[Array, " B"]  # row that stores the token in `last_token`; R for padding
    parameters: SamplingParameters


def draws_layout(width: int) -> VectorLayout:
    """The layout of the vector sent by every launch."""
    return _layout(("row", *SamplingParameters._fields), PLAIN_COLUMNS, width)


def extras_layout(width: int) -> VectorLayout:
    """The layout of the vector sent by launches with extras only."""
    return _layout(Extras._fields, EXTRA_COLUMNS, width)


def _layout(names: Sequence[str], columns: Mapping[str, Column], width: int) -> VectorLayout:
    """The layout of some fields. Fields without a column are integers, one for each place."""
    shapes = {name: (width, *(columns[name].shape if name in columns else ())) for name in names}
    return VectorLayout(
        shapes, frozenset(name for name, column in columns.items() if column.dtype == np.float32)
    )


def unpack_draws(layout: VectorLayout, vector: Int32[Array, " N"]) -> Draws:
    """The fields of a device vector; traced."""
    values = layout.unpack(vector)
    return Draws(values.pop("row"), SamplingParameters(**values))


def pack_draws(
    kept: Kept, rows: RowTable, layout: VectorLayout, *, for_scored: bool = False
) -> NDArray[np.int32]:
    """The vector of a launch; unused places are padding.

    Args:
        kept: the tokens of the launch.
        rows: the sampling fields of all rows.
        layout: the layout of the vector.
        for_scored: places with a known id to score have the fields of their request, too, and not neutral ones.
    """
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    number = len(kept.members)
    view["row"][:number] = kept.last_row
    view["row"][number:] = rows.num_rows
    view["position"][:number] = kept.context_len
    row = kept.request_row if for_scored else kept.row
    for name in PLAIN_COLUMNS:
        view[name][:number] = rows.sampling[name][row]
    return vector


class PackedDraws(NamedTuple):
    """The vector of a launch: the next one is made from it."""

    row: NDArray[np.int32]  # of its kept tokens
    layout: VectorLayout
    vector: NDArray[np.int32]  # the devices may still read it


class DrawsPacker:
    """Packs the vectors of launches one after the other.

    If a launch was made from an earlier one (`exec/pack.py:Packer`), so is its vector.

    Args:
        rows: the sampling fields of all rows.
        for_scored: see `pack_draws`.
    """

    def __init__(self, rows: RowTable, *, for_scored: bool) -> None:
        self._rows = rows
        self._for_scored = for_scored
        self._earlier: dict[int, PackedDraws] = {}  # by the row of the first token

    def pack(self, kept: Kept, layout: VectorLayout) -> NDArray[np.int32]:
        """The vector of a launch."""
        key = int(kept.request_row[0])
        earlier = self._earlier.get(key)
        if earlier is not None and earlier.row is kept.row and earlier.layout is layout:
            vector = earlier.vector.copy()
            place = layout.places["position"]
            vector[place.start : place.start + len(kept.row)] = kept.context_len
        else:
            vector = pack_draws(kept, self._rows, layout, for_scored=self._for_scored)
        self._earlier[key] = PackedDraws(kept.row, layout, vector)
        return vector


def kind_of_draws(vector: NDArray[np.int32], layout: VectorLayout) -> Kind:
    """The simplest kind of sampler sufficient for a launch."""
    view = layout.views(vector)
    draws = view["temperature"] > 0
    if not draws.any():
        return "greedy"
    if (draws & (view["top_k"] > WINDOW)).any():
        return "plain"
    is_filtered = (view["top_k"] > 0) | (view["top_p"] < 1) | (view["min_p"] > 0)
    return "filtered" if (draws & is_filtered).any() else "unfiltered"


def pack_extras(
    kept: Kept, num_top: Sequence[int | None], rows: RowTable, layout: VectorLayout
) -> NDArray[np.int32]:
    """The second vector of a launch with extras; unused places and scored ones have no penalties.

    `num_top` is the number of log probabilities to report for each kept token, or None.
    """
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    number = len(kept.members)
    for name, column in EXTRA_COLUMNS.items():
        view[name][:number] = rows.sampling[name][kept.row]
        view[name][number:] = column.neutral
    for place, target in enumerate(kept.targets):
        if target is not None:
            view["has_target"][place] = 1
            view["target"][place] = target
    view["wants_logprobs"][:number] = [count is not None for count in num_top]
    view["wants_top"][:number] = [bool(count) for count in num_top]
    return vector


def pack_masks(masks: Sequence[TokenSet | None], width: int, num_columns: int) -> NDArray[np.int32]:
    """Pack sets of ids into words `[B, V / 32]`; None allows everything, and so do unused places.

    Args:
        masks: the masks of the places in use.
        width: B.
        num_columns: V, a multiple of 32.
    """
    words = np.full((width, num_columns // WORD), -1, np.int32)
    everything = (1 << num_columns) - 1
    for place, allowed in enumerate(masks):
        if allowed is not None:
            words[place] = np.frombuffer(
                (allowed & everything).to_bytes(num_columns // 8, "little"), "<i4"
            )
    return words


Unembed = Callable[[Weights], Table]


class Drawn(NamedTuple):
    """Results of a sampler."""

    tokens: Int[Array, " B"]
    finite: Bool[Array, " B"]
    scores: TokenScores | None = None  # of the full sampler


def plain_kinds(platform: Platform) -> tuple[Kind, ...]:
    """The kinds of plain samplers for the devices of a platform.

    At each branch of a program a GPU waits for its host, and the host waits for all layers before the branch. So the
    most frequent kinds have no branches there.
    """
    if platform.waits_at_branches:
        return ("greedy", "unfiltered", "filtered", "plain")
    return ("plain",)


def make_plain_sampler(
    unembed: Unembed, width: int, vocab_size: int, mesh: Mesh, *, kind: Kind = "plain"
) -> Callable[[Weights, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Drawn]]:
    """Make the sampler `(weights, last_token [R], hidden, draws) -> (last_token, drawn)`.

    `last_token` is updated in place. Only the first `width` hidden vectors are used.

    Args:
        unembed: builds the unembedding from its weights.
        width: B.
        vocab_size: the number of tokens; the other columns are padding.
        mesh: the mesh of the weights.
        kind: the supported draws.
    """
    layout = draws_layout(width)

    def plain_sampler(
        weights: Weights, last_token: jax.Array, hidden: jax.Array, vector: jax.Array
    ) -> tuple[jax.Array, Drawn]:
        with jax.named_scope("sampling"):
            draws = unpack_draws(layout, vector)

            def draw(logits: Float[Array, "N V"], parameters: SamplingParameters) -> Drawn:
                return Drawn(
                    *sample(logits, parameters, vocab_size=vocab_size, mesh=mesh, kind=kind)
                )

            drawn = _draw(unembed(weights), hidden[:width], draws, draw, draws.parameters)
            return _keep(last_token, draws, drawn), drawn

    return plain_sampler


def make_full_sampler(
    unembed: Unembed,
    width: int,
    vocab_size: int,
    mesh: Mesh,
    *,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> Callable[..., tuple[jax.Array, Drawn]]:
    """Make `(weights, last_token, hidden, draws, history [R, L], extras, mask [B, V / 32]) -> (last_token, drawn)`."""
    layout = draws_layout(width)
    more = extras_layout(width)

    def full_sampler(
        weights: Weights,
        last_token: jax.Array,
        hidden: jax.Array,
        vector: jax.Array,
        history: jax.Array,
        extras_vector: jax.Array,
        mask: jax.Array,
    ) -> tuple[jax.Array, Drawn]:
        with jax.named_scope("sampling"):
            draws = unpack_draws(layout, vector)
            extras = Extras(**more.unpack(extras_vector))

            def draw(
                logits: Float[Array, "N V"], draws: Draws, extras: Extras, mask: jax.Array
            ) -> Drawn:
                parameters = draws.parameters
                context = Context(history, draws.row, parameters.position)
                return sample_full(
                    logits,
                    parameters,
                    extras,
                    context,
                    mask,
                    vocab_size=vocab_size,
                    mesh=mesh,
                    logprobs_mode=logprobs_mode,
                )

            drawn = _draw(unembed(weights), hidden[:width], draws, draw, draws, extras, mask)
            return _keep(last_token, draws, drawn), drawn

    return full_sampler


def sample_full(
    logits: Float[Array, "B V"],
    parameters: SamplingParameters,
    extras: Extras,
    context: Context,
    mask: Int[Array, "B W"],
    *,
    vocab_size: int,
    mesh: Mesh,
    logprobs_mode: LogprobsMode = "raw_logprobs",
) -> Drawn:
    """Sample from logits changed by the extras, and score those that `logprobs_mode` names."""
    shards = VocabularyShards(vocab_size, TENSOR_AXIS)

    def on_shard(
        logits: Float[Array, "B N"],
        parameters: SamplingParameters,
        extras: Extras,
        context: Context,
        mask: Int[Array, "B W"],
    ) -> Drawn:
        finite = shards.all_finite(logits)
        logits = shards.without_padding(logits)
        changed = change_logits(logits, extras, context, mask, shards)
        tokens = choose(changed, parameters, shards)
        chosen = jnp.where(extras.has_target != 0, extras.target, tokens)

        def scored() -> TokenScores:
            return score(logits, changed, chosen, parameters, extras, shards, logprobs_mode)

        scores = lax.cond(
            jnp.any(extras.wants_logprobs != 0), scored, lambda: no_scores(logits.shape[0])
        )
        return Drawn(tokens, finite, scores)

    everywhere = PartitionSpec()
    over_vocabulary = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(PartitionSpec(None, TENSOR_AXIS), everywhere, everywhere, everywhere, everywhere),
        out_specs=everywhere,
        check_vma=False,  # every shard computes the same results from gathered values
    )
    drawn: Drawn = over_vocabulary(logits, parameters, extras, context, mask)
    return drawn


def _draw(
    table: Table,
    hidden: Float[Array, "B E"],
    draws: Draws,
    draw: Callable[..., Drawn],
    *places: Any,
) -> Drawn:
    """Call `draw` with the logits and with `places`, arrays with a value of each place.

    If the table can skip vectors, nothing is computed for groups of places that are not in use.
    """
    if not table.can_skip:
        return draw(table.scores(hidden), *places)
    count = jnp.sum(draws.parameters.position > 0, dtype=jnp.int32)
    given = table.scores(hidden, count), *places
    size = min(max(_LEAST_GROUP, _GROUP_SCORES // table.num_rows), len(hidden))

    def of_group(start: Int[Array, ""]) -> Drawn:
        return draw(
            *jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, start, size), given)
        )

    def add_group(group: Int[Array, ""], drawn: Drawn) -> Drawn:
        start = group * size  # the last group begins `size` places before the end at the latest
        return jax.tree.map(
            partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0),
            drawn,
            of_group(start),
        )

    shapes = jax.eval_shape(of_group, jnp.int32(0))
    nothing = jax.tree.map(
        lambda each: jnp.zeros((len(hidden), *each.shape[1:]), each.dtype), shapes
    )
    drawn: Drawn = lax.fori_loop(0, (count + size - 1) // size, add_group, nothing)
    return drawn


def _keep(last_token: Int[Array, " R"], draws: Draws, drawn: Drawn) -> Int[Array, " R"]:
    """Store each row's last token; places without a row are dropped."""
    return last_token.at[draws.row].set(drawn.tokens, mode="drop", unique_indices=True)
