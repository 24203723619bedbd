"""The table of sampling fields, and the host's copy of the state of each row between iterations.

The table defines the columns of the rows, the packed vectors, and the traced tuples. To add a number, add a field to
`SamplingParameters` or `Extras`, a row to a table below, and the arithmetic to `draw.py` or `adjust.py`. The fields of
a traced tuple are in the order of its vector. Plans carry only the changes of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike, DTypeLike, NDArray

from orca_jax.values.cache_spec import NO_BLOCK
from orca_jax.values.request import MAX_LOGIT_BIAS
from orca_jax.values.step import Member, RowSampling


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
    num_scored: Int[Array, " B"]  # of the listed ids, the first ones: those to score
    listed_id: Int[Array, "B M"]  # ids to score, and after them ids with biases
    bias: Float[Array, "B M"]  # 0 for ids to score and for padding
    wants_logprobs: Int[Array, " B"]
    wants_top: Int[Array, " B"]
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


def _listed(row: RowSampling) -> Any:
    ids = [*row.params.logprob_token_ids, *row.params.logit_bias]
    return np.array(ids + [0] * (MAX_LOGIT_BIAS - len(ids)), np.int32)


def _biases(row: RowSampling) -> Any:
    first = len(row.params.logprob_token_ids)
    padded = np.zeros(MAX_LOGIT_BIAS, np.float32)
    padded[first : first + len(row.params.logit_bias)] = list(row.params.logit_bias.values())
    return padded


PLAIN_COLUMNS: Mapping[str, Column] = {
    "temperature": Column(lambda row: row.params.temperature),
    # for users -1 means all tokens, too
    "top_k": Column(lambda row: max(row.params.top_k, 0), np.int32),
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
    "num_scored": Column(lambda row: len(row.params.logprob_token_ids), np.int32),
    "listed_id": Column(_listed, np.int32, shape=(MAX_LOGIT_BIAS,)),
    "bias": Column(_biases, shape=(MAX_LOGIT_BIAS,)),
}
"""Fields of `Extras` that come from the row; only launches with extras send them."""

COLUMNS: Mapping[str, Column] = {**PLAIN_COLUMNS, **EXTRA_COLUMNS}


class VectorSums:
    """Sums of hidden vectors, for the means of requests whose tokens are computed in several launches."""

    def __init__(self) -> None:
        self._sums: dict[int, NDArray[np.float64]] = {}

    def add_vectors(
        self, row: int, position: int, vectors: NDArray[np.floating]
    ) -> NDArray[np.float64]:
        """Add the vectors of the tokens from `position` on, one by one, and return the sum from position 0 on.

        The sum of float64 in the order of the tokens does not depend on the launches.
        """
        before = np.zeros((1, vectors.shape[1])) if position == 0 else self._sums[row][None]
        self._sums[row] = total = np.cumsum(
            np.concatenate([before, vectors], dtype=np.float64), axis=0
        )[-1]
        return total

    def forget_row(self, row: int) -> None:
        """Forget the sum of a row."""
        del self._sums[row]


class RowTable:
    """Blocks of each row, and the sampling fields of its request; row `num_rows` is an extra one without a request.

    This last row is neutral: greedy, without penalties or biases.

    Attributes:
        blocks: [groups, rows, pages] of the longest request; entries that a row never had or gave back have no meaning.
    """

    def __init__(self, num_rows: int, num_pages: int, num_groups: int = 1) -> None:
        rows = num_rows + 1
        self.num_rows = num_rows
        self.blocks = np.zeros((num_groups, rows, num_pages), np.int32)
        self.sampling: dict[str, NDArray[np.float32] | NDArray[np.int32]] = {
            name: np.full((rows, *column.shape), column.neutral, column.dtype)
            for name, column in COLUMNS.items()
        }
        self.slot = np.zeros(rows, np.int32)  # of each row's adapter
        self.has_extras = [False] * rows
        self.logprobs: list[int | None] = [None] * rows
        self.scored: list[Sequence[int]] = [()] * rows  # ids to score after each token

    def update(self, members: Sequence[Member]) -> None:
        """Apply the changes of a plan."""
        for member in members:
            for group, blocks in enumerate(member.new_blocks):
                self._set_blocks(group, member.row, member.num_old_blocks, blocks)
            if member.sampling is not None:
                self._set_sampling(member.row, member.sampling)

    def has_adapters(self, rows: Sequence[int]) -> bool:
        """True if a request of these rows has an adapter."""
        return bool(self.slot[rows].any())

    def _set_blocks(self, group: int, row: int, first: int, blocks: Sequence[int]) -> None:
        """Write entries of a row from `first` on. `NO_BLOCK` is not an index; a hit has it in the first entries."""
        if blocks and blocks[0] == NO_BLOCK:
            blocks = np.maximum(blocks, 0).tolist()
        self.blocks[group, row, first : first + len(blocks)] = blocks

    def _set_sampling(self, row: int, sampling: RowSampling) -> None:
        for name, column in COLUMNS.items():
            self.sampling[name][row] = column.value(sampling)
        self.slot[row] = sampling.slot
        self.has_extras[row] = sampling.params.has_extras
        self.logprobs[row] = sampling.params.logprobs
        self.scored[row] = sampling.params.logprob_token_ids
