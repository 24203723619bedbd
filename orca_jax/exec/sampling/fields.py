"""The table of sampling fields: it defines the columns of the row table, the packed vectors, and the traced tuples.

To add a number, add a field to `SamplingParameters` or `Extras`, a row to a table below, and the arithmetic to
`draw.py` or `adjust.py`. The fields of a traced tuple are in the order of its vector.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike, DTypeLike

from orca_jax.request import MAX_LOGIT_BIAS
from orca_jax.step import RowSampling


class SamplingParameters(NamedTuple):
    """Traced values for each place of a sampler."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]  # 0: all
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed_high: Int[Array, " B"]
    seed_low: Int[Array, " B"]
    position: Int[Array, " B"]  # of the token to be drawn; from the launch, not from the row


class Extras(NamedTuple):
    """Traced values of full samplers, one or several for each place."""

    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    repetition: Float[Array, " B"]
    num_prompt: Int[Array, " B"]  # the context's first tokens, which were not generated
    bias_id: Int[Array, "B M"]
    bias: Float[Array, "B M"]  # 0 for padding
    wants_logprobs: Int[Array, " B"]
    has_target: Int[Array, " B"]
    target: Int[Array, " B"]  # the id that is scored in place of the drawn one


class Column(NamedTuple):
    """One sampling field of a row, kept on the host while the row has a holder."""

    value: Callable[[RowSampling], ArrayLike]
    dtype: DTypeLike = np.float32
    neutral: float = 0  # the value of rows without a request and of unused places
    shape: tuple[int, ...] = ()  # () for a number


def _seed_halves(sampling: RowSampling) -> Any:
    return np.array(divmod(sampling.seed % 2**64, 2**32), np.uint32).view(np.int32)


def _padded_bias(values: "list[Any]", dtype: DTypeLike) -> Any:
    padded = np.zeros(MAX_LOGIT_BIAS, dtype)
    padded[: len(values)] = values
    return padded


PLAIN_COLUMNS: Mapping[str, Column] = {
    "temperature": Column(lambda row: row.params.temperature),
    "top_k": Column(lambda row: max(row.params.top_k, 0), np.int32),  # for users -1 means all tokens, too
    "top_p": Column(lambda row: row.params.top_p, neutral=1),
    "min_p": Column(lambda row: row.params.min_p),
    "seed_high": Column(lambda row: _seed_halves(row)[0], np.int32),
    "seed_low": Column(lambda row: _seed_halves(row)[1], np.int32),
}
"""Fields of `SamplingParameters` that every launch sends."""

EXTRA_COLUMNS: Mapping[str, Column] = {
    "presence": Column(lambda row: row.params.presence_penalty),
    "frequency": Column(lambda row: row.params.frequency_penalty),
    "repetition": Column(lambda row: row.params.repetition_penalty, neutral=1),
    "num_prompt": Column(lambda row: row.num_prompt, np.int32),
    "bias_id": Column(
        lambda row: _padded_bias(list(row.params.logit_bias), np.int32), np.int32, shape=(MAX_LOGIT_BIAS,)
    ),
    "bias": Column(lambda row: _padded_bias(list(row.params.logit_bias.values()), np.float32), shape=(MAX_LOGIT_BIAS,)),
}
"""Fields of `Extras` that come from the row; only launches with extras send them."""

COLUMNS: Mapping[str, Column] = {**PLAIN_COLUMNS, **EXTRA_COLUMNS}
