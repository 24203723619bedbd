"""Changes of a row's logits before the draw: bias, penalties, and a mask of allowed tokens.

Everything runs on one shard of the vocabulary, N of the columns, without data of the other shards. Biases and penalties
are skipped if no row of a launch uses them.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from orca_jax.exec.rows import Extras
from orca_jax.exec.sampling.draw import VocabularyShards

WORD = 32  # columns in a word of a mask
_STRIDE = 128  # positions of the history that are counted at a time


class Context(NamedTuple):
    """The ids before the next token of each place."""

    history: Int[Array, "R L"]  # ids of all rows by position
    row: Int[Array, " B"]
    length: Int[Array, " B"]  # positions that count


def change_logits(
    logits: Float[Array, "B N"],
    extras: Extras,
    context: Context,
    mask: Int[Array, "B W"],
    shards: VocabularyShards,
) -> Float[Array, "B N"]:
    """Apply biases, then penalties, then the mask: minus infinity for every token without a bit.

    Bit i of a row's mask, counted from the lowest of the first word, stands for token i.
    """
    first = shards.first_column(logits)
    logits = lax.cond(
        jnp.any(extras.bias != 0), partial(_add_bias, logits, extras, first), lambda: logits
    )
    penalised = (extras.presence != 0) | (extras.frequency != 0) | (extras.repetition != 1)
    # Rows without penalties need no counts.
    counted = context._replace(length=jnp.where(penalised, context.length, 0))
    logits = lax.cond(
        jnp.any(penalised), partial(_penalise, logits, extras, counted, first), lambda: logits
    )
    return jnp.where(_allowed(mask, first, logits.shape[1]), logits, -jnp.inf)


def _add_bias(
    logits: Float[Array, "B N"], extras: Extras, first: Int[Array, ""]
) -> Float[Array, "B N"]:
    row = jnp.arange(logits.shape[0])[:, None]
    column = column_of(extras.listed_id, first, logits.shape[1])
    return logits.at[row, column].add(extras.bias, mode="drop")


def _penalise(
    logits: Float[Array, "B N"], extras: Extras, context: Context, first: Int[Array, ""]
) -> Float[Array, "B N"]:
    """Apply Hugging Face's repetition penalty to the whole context, then OpenAI's penalties to generated tokens."""
    counts = _count(context, extras.num_prompt, first, logits.shape[1])
    generated = counts[:, 1].astype(jnp.float32)
    repetition = extras.repetition[:, None]
    repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(counts.any(axis=1), repeated, logits)
    logits = logits - extras.frequency[:, None] * generated
    return logits - jnp.where(generated > 0, extras.presence[:, None], 0.0)


def _count(
    context: Context, num_prompt: Int[Array, " B"], first: Int[Array, ""], num_columns: int
) -> Int[Array, "B 2 N"]:
    """Occurrences of each of `num_columns` tokens in the prompt and among the generated tokens.

    The history is read in strides up to the longest context, so the work is proportional to real lengths.
    """
    width = context.row.shape[0]
    longest = context.history.shape[1]
    stride = min(_STRIDE, longest)
    place = jnp.arange(width)[:, None]

    def count(step: Int[Array, ""], counts: Int[Array, "B 2 N"]) -> Int[Array, "B 2 N"]:
        # the last stride overlaps the one before
        start = jnp.minimum(step * stride, longest - stride)
        ids = lax.dynamic_slice_in_dim(context.history, start, stride, axis=1)[context.row]
        position = start + jnp.arange(stride)
        counts_here = (position >= step * stride) & (position < context.length[:, None])
        is_generated = (position >= num_prompt[:, None]).astype(jnp.int32)
        column = jnp.where(counts_here, column_of(ids, first, num_columns), num_columns)
        return counts.at[place, is_generated, column].add(1, mode="drop")

    steps = (jnp.max(context.length) + stride - 1) // stride
    counts: Array = lax.fori_loop(0, steps, count, jnp.zeros((width, 2, num_columns), jnp.int32))
    return counts


def column_of(ids: Int[Array, "B M"], first: Int[Array, ""], num_columns: int) -> Int[Array, "B M"]:
    """Columns of ids on this shard; ids of other shards become `num_columns`, to be dropped by scatters."""
    column = ids - first
    return jnp.where((column >= 0) & (column < num_columns), column, num_columns)


def _allowed(
    mask: Int[Array, "B W"], first: Int[Array, ""], num_columns: int
) -> Bool[Array, "B N"]:
    """This shard's columns of the mask. A shard begins with a whole word."""
    words = lax.dynamic_slice_in_dim(mask, first // WORD, num_columns // WORD, axis=1)
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=mask.dtype)) & 1
    return bits.reshape(mask.shape[0], -1) != 0
