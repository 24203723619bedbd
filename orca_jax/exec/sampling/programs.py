"""The samplers: programs from hidden vectors to tokens. Their number does not depend on the buckets.

Plain samplers exist for several widths, 8, 16, and so on, up to one place for each row; on a GPU there are two more
kinds of them, without any branch. The full sampler supports every sampling feature. It is compiled for the smallest and
the largest width only, and a launch without these features does not pay for them. The samplers are programs apart from
the layers, so the host can compute the masks of a grammar while the layers run.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from orca_jax.exec.layers import Weights
from orca_jax.exec.sampling.adjust import Context, change_logits
from orca_jax.exec.sampling.draw import Kind, VocabularyShards, choose, sample
from orca_jax.exec.sampling.fields import Extras, SamplingParameters
from orca_jax.exec.sampling.logprobs import TopLogprobs, no_scores, score
from orca_jax.exec.sampling.pack import Draws, draws_layout, extras_layout, unpack_draws
from orca_jax.model.layers import Table
from orca_jax.model.sharding import TENSOR_AXIS

Unembed = Callable[[Weights], Table]


class Drawn(NamedTuple):
    """Results of a sampler."""

    tokens: Int[Array, " B"]
    finite: Bool[Array, " B"]
    top: TopLogprobs | None = None  # of the full sampler


def plain_kinds(platform: str) -> tuple[Kind, ...]:
    """The kinds of plain samplers for the devices of a platform.

    At each branch of a program a GPU waits for its host, and the host waits for all layers before the branch. So the
    most frequent kinds have no branches on a GPU.
    """
    return ("greedy", "unfiltered", "plain") if platform == "gpu" else ("plain",)


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
            logits = unembed(weights).scores(hidden[:width])
            tokens, finite = sample(logits, draws.parameters, vocab_size=vocab_size, mesh=mesh, kind=kind)
            drawn = Drawn(tokens, finite)
            return _keep(last_token, draws, drawn), drawn

    return plain_sampler


def make_full_sampler(
    unembed: Unembed, width: int, vocab_size: int, mesh: Mesh
) -> Callable[..., tuple[jax.Array, Drawn]]:
    """Make `(weights, last_token, hidden, draws, history [R, L], extras, mask [B, V / 32]) -> (last_token, drawn)`."""
    layout, more = draws_layout(width), extras_layout(width)

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
            draws, extras = unpack_draws(layout, vector), Extras(**more.unpack(extras_vector))
            logits = unembed(weights).scores(hidden[:width])
            context = Context(history, draws.row, draws.parameters.position)
            drawn = sample_full(logits, draws.parameters, extras, context, mask, vocab_size=vocab_size, mesh=mesh)
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
) -> Drawn:
    """Sample from logits changed by the extras, and score the unchanged logits."""
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
        top = lax.cond(
            jnp.any(extras.wants_logprobs != 0),
            lambda: score(logits, chosen, shards),
            lambda: no_scores(logits.shape[0]),
        )
        return Drawn(tokens, finite, top)

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


def _keep(last_token: Int[Array, " R"], draws: Draws, drawn: Drawn) -> Int[Array, " R"]:
    """Store each row's last token; places without a row are dropped."""
    return last_token.at[draws.row].set(drawn.tokens, mode="drop", unique_indices=True)
