"""One iteration on the device: the program that is compiled once for each bucket.

Token-wise operations run on all tokens of the merged batch; attention alone is split by request, inside one call
(paper section 3.2). Only rows that sample go through the unembedding and the sampler.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from orca_jax.config import ExecutorConfig, ModelConfig
from orca_jax.exec.cache import PAGES_SPEC
from orca_jax.exec.pack import Batch, Layout
from orca_jax.exec.sample import SamplingParameters, sample
from orca_jax.kernels.kv_pages import KVPages
from orca_jax.kernels.kv_write import write_kv
from orca_jax.kernels.ragged_attention import ragged_attention
from orca_jax.model.attention import Attend
from orca_jax.model.sharding import MESH_AXES
from orca_jax.model.transformer import Decoder

HEADS_SPEC = PartitionSpec(None, MESH_AXES["heads"], None)

# A launch of prompts has few sampling rows, and unembedding all of them would cost it some 5 %.
_FEW = 8

Weights = Sequence[jax.Array]
Iteration = Callable[[Weights, KVPages, jax.Array, jax.Array], tuple[KVPages, jax.Array, jax.Array, jax.Array]]
"""Pages and last tokens of rows [R] stay on the device between iterations, donated from one to the next."""


def make_iteration(
    structure: Callable[[Weights], Decoder], model: ModelConfig, config: ExecutorConfig, layout: Layout, mesh: Mesh
) -> Iteration:
    """The program of one bucket: `(weights, pages, last_token, vector) -> (pages, last_token, tokens [B], finite [B])`.

    Args:
        structure: puts a decoder together from its weights.
        model: of the decoder.
        config: cache and attention.
        layout: of `vector`.
        mesh: of weights and pages.
    """

    def iteration(
        weights: Weights, pages: KVPages, last_token: jax.Array, vector: jax.Array
    ) -> tuple[KVPages, jax.Array, jax.Array, jax.Array]:
        batch = layout.unpack(vector)
        decoder = structure(weights)
        ids = jnp.where(batch.on_device, last_token[batch.token_row], batch.ids)
        attend = _make_attend(batch, model, config, mesh)
        hidden, pages = decoder(ids, batch.positions, attend, pages, keep=batch.sample_token)
        with jax.named_scope("sampling"):
            draw = partial(_unembed_and_sample, decoder, hidden, batch, model.vocab_size, mesh)
            if layout.num_samples > _FEW:
                num_sampling = jnp.sum(batch.sample_row < layout.num_rows)
                few, all_rows = partial(draw, _FEW), partial(draw, layout.num_samples)
                tokens, finite = jax.lax.cond(num_sampling <= _FEW, few, all_rows)
            else:
                tokens, finite = draw(layout.num_samples)
            last_token = last_token.at[batch.sample_row].set(tokens, mode="drop", unique_indices=True)
        return pages, last_token, tokens, finite

    return iteration


def _unembed_and_sample(
    decoder: Decoder, hidden: Float[Array, "B E"], batch: Batch, vocab_size: int, mesh: Mesh, rows: int
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Tokens of the first `rows` sampling rows; the rest are filled up and mean nothing."""
    logits = decoder.unembed(hidden[:rows])
    parameters = SamplingParameters(
        batch.temperature, batch.top_k, batch.top_p, batch.seed_high, batch.seed_low, batch.sample_position
    )
    parameters = SamplingParameters(*(values[:rows] for values in parameters))
    results = sample(logits, parameters, vocab_size=vocab_size, mesh=mesh)
    tokens, finite = (jnp.pad(values, (0, batch.sample_token.shape[0] - rows)) for values in results)
    return tokens, finite


def _make_attend(batch: Batch, model: ModelConfig, config: ExecutorConfig, mesh: Mesh) -> Attend[KVPages]:
    """Attention of one layer over this batch: write the new K and V, then split by request; sharded over heads."""
    num_pages = config.cache.num_pages
    scale = model.head_dim**-0.5
    everywhere = PartitionSpec()

    def on_shard(
        layer: Int[Array, ""],
        batch: Batch,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        pages: KVPages,
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        requests = batch.page_table + layer * num_pages, batch.query_start, batch.query_len, batch.context_len
        pages = write_kv(pages, k, v, *requests)
        out = ragged_attention(q, pages, *requests, scale=scale, implementation=config.attention_implementation)
        return out, pages

    split = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(everywhere, everywhere, HEADS_SPEC, HEADS_SPEC, HEADS_SPEC, PAGES_SPEC),
        out_specs=(HEADS_SPEC, PAGES_SPEC),
        check_vma=False,  # a loop whose trip count is the same on all shards needs no collective
    )

    def attend(
        layer: Int[Array, ""], q: Array, k: Array, v: Array, pages: KVPages
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        with jax.named_scope("attention"):
            out: tuple[Array, KVPages] = split(layer, batch, q, k, v, pages)
            return out

    return attend


def decoder_structure(decoder: Decoder) -> tuple[Callable[[Weights], Decoder], list[jax.Array]]:
    """A decoder as flat weights, which are quick to pass, and the function that puts it together again."""
    graph, state = nnx.split(decoder)
    weights, tree = jax.tree.flatten(state)

    def structure(weights: Weights) -> Decoder:
        merged: Decoder = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        return merged

    return structure, weights
