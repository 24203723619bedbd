"""The inputs of samplers beside hidden vectors: one vector for every launch, and two more arrays for full samplers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int, Int32
from numpy.typing import NDArray

from orca_jax.exec.pack import Kept, VectorLayout
from orca_jax.exec.rows import RowTable
from orca_jax.exec.sampling.adjust import WORD
from orca_jax.exec.sampling.draw import Kind
from orca_jax.exec.sampling.fields import EXTRA_COLUMNS, PLAIN_COLUMNS, Column, Extras, SamplingParameters
from orca_jax.request import TokenSet


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
    return VectorLayout(shapes, frozenset(name for name, column in columns.items() if column.dtype == np.float32))


def unpack_draws(layout: VectorLayout, vector: Int32[Array, " N"]) -> Draws:
    """The fields of a device vector; traced."""
    values = layout.unpack(vector)
    return Draws(values.pop("row"), SamplingParameters(**values))


def pack_draws(kept: Kept, rows: RowTable, layout: VectorLayout) -> NDArray[np.int32]:
    """The vector of a launch; unused places are padding."""
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    number = len(kept.members)
    view["row"][:number], view["row"][number:] = kept.last_row, rows.num_rows
    view["position"][:number] = kept.context_len
    for name in PLAIN_COLUMNS:
        view[name][:number] = rows.sampling[name][kept.row]
    return vector


def kind_of_draws(vector: NDArray[np.int32], layout: VectorLayout) -> Kind:
    """The simplest kind of sampler sufficient for a launch."""
    view = layout.views(vector)
    draws = view["temperature"] > 0
    if not draws.any():
        return "greedy"
    is_filtered = (view["top_k"] > 0) | (view["top_p"] < 1) | (view["min_p"] > 0)
    return "plain" if (draws & is_filtered).any() else "unfiltered"


def pack_extras(kept: Kept, rows: RowTable, layout: VectorLayout) -> NDArray[np.int32]:
    """The second vector of a launch with extras; unused places and scored ones have no penalties."""
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    number = len(kept.members)
    for name, column in EXTRA_COLUMNS.items():
        view[name][:number], view[name][number:] = rows.sampling[name][kept.row], column.neutral
    for place, target in enumerate(kept.targets):
        if target is not None:
            view["has_target"][place], view["target"][place] = 1, target
        view["wants_logprobs"][place] = target is not None or rows.logprobs[kept.row[place]] is not None
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
            words[place] = np.frombuffer((allowed & everything).to_bytes(num_columns // 8, "little"), "<i4")
    return words
