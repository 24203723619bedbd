"""The samplers: programs from hidden vectors to tokens. Their number does not depend on the buckets.

Plain samplers exist for 8, 16, ... places, up to one for each row; on a GPU there are more kinds of them, without any
branch. The full sampler supports every sampling feature. It is compiled for the smallest and the largest size only,
and a launch without these features does not pay for them. The samplers are programs apart from the layers, so the host
can compute the masks of a grammar while the layers run.
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
from orca_jax.exec.sampling.draw import Kind, all_finite, choose, sample, without_padding
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

    A GPU waits for its host at each branch of a program, and the host waits for all layers before it. So the most
    frequent kinds have no branches there.
    """
    return ("greedy", "unfiltered", "plain") if platform == "gpu" else ("plain",)


def make_plain_sampler(
    unembed: Unembed, num_places: int, vocab_size: int, mesh: Mesh, *, kind: Kind = "plain"
) -> Callable[[Weights, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Drawn]]:
    """`(weights, last_token [R], hidden, draws) -> (last_token, drawn)`; `last_token` is updated in place.

    Of the hidden vectors the first `num_places` are used.

    Args:
        unembed: makes the unembedding from its weights.
        num_places: B.
        vocab_size: tokens that exist.
        mesh: of the weights.
        kind: the features that its places may use.
    """
    layout = draws_layout(num_places)

    def plain_sampler(
        weights: Weights, last_token: jax.Array, hidden: jax.Array, vector: jax.Array
    ) -> tuple[jax.Array, Drawn]:
        with jax.named_scope("sampling"):
            draws = unpack_draws(layout, vector)
            logits = unembed(weights).scores(hidden[:num_places])
            tokens, finite = sample(logits, draws.parameters, vocab_size=vocab_size, mesh=mesh, kind=kind)
            drawn = Drawn(tokens, finite)
            return _keep(last_token, draws, drawn), drawn

    return plain_sampler


def make_full_sampler(
    unembed: Unembed, num_places: int, vocab_size: int, mesh: Mesh
) -> Callable[..., tuple[jax.Array, Drawn]]:
    """`(weights, last_token, hidden, draws, history [R, L], extras, mask [B, V / 32]) -> (last_token, drawn)`."""
    layout, more = draws_layout(num_places), extras_layout(num_places)

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
            logits = unembed(weights).scores(hidden[:num_places])
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
    """`sample` on logits changed by the extras, and log probabilities of the logits before that."""

    def on_shard(
        logits: Float[Array, "B N"],
        parameters: SamplingParameters,
        extras: Extras,
        context: Context,
        mask: Int[Array, "B W"],
    ) -> Drawn:
        finite = all_finite(logits, TENSOR_AXIS)
        logits = without_padding(logits, vocab_size, TENSOR_AXIS)
        changed = change_logits(logits, extras, context, mask, TENSOR_AXIS)
        tokens = choose(changed, parameters, vocab_size=vocab_size, axis=TENSOR_AXIS)
        chosen = jnp.where(extras.has_target != 0, extras.target, tokens)
        top = lax.cond(
            jnp.any(extras.wants_logprobs != 0),
            lambda: score(logits, chosen, TENSOR_AXIS),
            lambda: no_scores(logits.shape[0]),
        )
        return Drawn(tokens, finite, top)

    everywhere = PartitionSpec()
    over_vocabulary = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(PartitionSpec(None, TENSOR_AXIS), everywhere, everywhere, everywhere, everywhere),
        out_specs=everywhere,
        check_vma=False,  # every shard computes the same results from what it gathered
    )
    drawn: Drawn = over_vocabulary(logits, parameters, extras, context, mask)
    return drawn


def _keep(last_token: Int[Array, " R"], draws: Draws, drawn: Drawn) -> Int[Array, " R"]:
    """Store each row's last token; places without a row are dropped."""
    return last_token.at[draws.row].set(drawn.tokens, mode="drop", unique_indices=True)
