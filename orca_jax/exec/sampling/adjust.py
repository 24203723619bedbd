"""What changes the logits of a row before it draws: bias, penalties, and a mask of what it may draw.

Everything runs on one shard of the vocabulary, N of the columns, and needs nothing from the others. Biases and
penalties that no row of a launch asks for are skipped.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from orca_jax.exec.sampling.draw import first_column
from orca_jax.exec.sampling.fields import Extras

WORD = 32  # columns in a word of a mask
_STRIDE = 128  # positions of the history that are counted at a time


class Context(NamedTuple):
    """The ids that each place's next token follows."""

    history: Int[Array, "R L"]  # ids of all rows by position
    row: Int[Array, " B"]
    length: Int[Array, " B"]  # positions that count


def change_logits(
    logits: Float[Array, "B N"], extras: Extras, context: Context, mask: Int[Array, "B W"], axis: str
) -> Float[Array, "B N"]:
    """Bias, then penalties, then minus infinity where the mask has no bit.

    Bit i of a row's mask, counted from the lowest of the first word, stands for token i.
    """
    first = first_column(logits, axis)
    logits = lax.cond(jnp.any(extras.bias != 0), partial(_add_bias, logits, extras, first), lambda: logits)
    penalised = (extras.presence != 0) | (extras.frequency != 0) | (extras.repetition != 1)
    # Rows without penalties have no context worth counting.
    counted = context._replace(length=jnp.where(penalised, context.length, 0))
    logits = lax.cond(jnp.any(penalised), partial(_penalise, logits, extras, counted, first), lambda: logits)
    return jnp.where(_allowed(mask, first, logits.shape[1]), logits, -jnp.inf)


def _add_bias(logits: Float[Array, "B N"], extras: Extras, first: Int[Array, ""]) -> Float[Array, "B N"]:
    row = jnp.arange(logits.shape[0])[:, None]
    column = _column(extras.bias_id, first, logits.shape[1])
    return logits.at[row, column].add(extras.bias, mode="drop")


def _penalise(
    logits: Float[Array, "B N"], extras: Extras, context: Context, first: Int[Array, ""]
) -> Float[Array, "B N"]:
    """Repetition as in Hugging Face's generate(), on the whole context; then OpenAI's, on what was generated."""
    counts = _count(context, extras.num_prompt, first, logits.shape[1])
    generated = counts[:, 1].astype(jnp.float32)
    repetition = extras.repetition[:, None]
    repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(counts.any(axis=1), repeated, logits)
    logits = logits - extras.frequency[:, None] * generated
    return logits - jnp.where(generated > 0, extras.presence[:, None], 0.0)


def _count(context: Context, num_prompt: Int[Array, " B"], first: Int[Array, ""], width: int) -> Int[Array, "B 2 N"]:
    """How often each of `width` tokens stands in the prompt and in what was generated.

    Walks the history in strides up to the longest context, so that the work follows real lengths.
    """
    places, longest = context.row.shape[0], context.history.shape[1]
    stride = min(_STRIDE, longest)
    place = jnp.arange(places)[:, None]

    def count(step: Int[Array, ""], counts: Int[Array, "B 2 N"]) -> Int[Array, "B 2 N"]:
        start = jnp.minimum(step * stride, longest - stride)  # the last stride overlaps the one before
        ids = lax.dynamic_slice_in_dim(context.history, start, stride, axis=1)[context.row]
        position = start + jnp.arange(stride)
        counts_here = (position >= step * stride) & (position < context.length[:, None])
        is_generated = (position >= num_prompt[:, None]).astype(jnp.int32)
        column = jnp.where(counts_here, _column(ids, first, width), width)
        return counts.at[place, is_generated, column].add(1, mode="drop")

    steps = (jnp.max(context.length) + stride - 1) // stride
    counts: Array = lax.fori_loop(0, steps, count, jnp.zeros((places, 2, width), jnp.int32))
    return counts


def _column(ids: Int[Array, "B M"], first: Int[Array, ""], width: int) -> Int[Array, "B M"]:
    """Columns of ids on this shard; those of other shards become `width`, which scatters drop."""
    column = ids - first
    return jnp.where((column >= 0) & (column < width), column, width)


def _allowed(mask: Int[Array, "B W"], first: Int[Array, ""], width: int) -> Bool[Array, "B N"]:
    """This shard's columns of the mask; a shard may begin within a word."""
    bits = (mask[:, :, None] >> jnp.arange(WORD, dtype=mask.dtype)) & 1
    return lax.dynamic_slice_in_dim(bits.reshape(mask.shape[0], -1), first, width, axis=1) != 0
