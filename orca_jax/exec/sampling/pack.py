"""What the samplers need beside hidden vectors: one vector for every launch, and two more arrays for full ones."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int, Int32
from numpy.typing import NDArray

from orca_jax.exec.pack import Kept
from orca_jax.exec.rows import RowTable
from orca_jax.exec.sampling.adjust import WORD, Extras
from orca_jax.exec.sampling.draw import Kind, SamplingParameters
from orca_jax.exec.vector import VectorLayout
from orca_jax.step import MAX_LOGIT_BIAS, TokenSet

_PER_ROW = ("temperature", "top_k", "top_p", "min_p", "seed_high", "seed_low")
_EXTRAS_PER_ROW = ("presence", "frequency", "repetition", "num_prompt", "bias_id", "bias")


class Draws(NamedTuple):
    """The places of one sampler."""

    row: Int[Array, " B"]  # that keeps the token as its last; R for places that draw for nobody
    parameters: SamplingParameters


def draws_layout(num_places: int) -> VectorLayout:
    """Of the vector that every launch sends."""
    shapes = dict.fromkeys(("row", *SamplingParameters._fields), (num_places,))
    return VectorLayout(shapes, frozenset({"temperature", "top_p", "min_p"}))


def extras_layout(num_places: int) -> VectorLayout:
    """Of the vector that only launches with extras send."""
    biases = dict.fromkeys(("bias_id", "bias"), (num_places, MAX_LOGIT_BIAS))
    shapes: Mapping[str, tuple[int, ...]] = {**dict.fromkeys(Extras._fields, (num_places,)), **biases}
    return VectorLayout(shapes, frozenset({"presence", "frequency", "repetition", "bias"}))


def unpack_draws(layout: VectorLayout, vector: Int32[Array, " N"]) -> Draws:
    """On the device; traced."""
    values = layout.unpack(vector)
    return Draws(values.pop("row"), SamplingParameters(**values))


def pack_draws(kept: Kept, rows: RowTable, layout: VectorLayout) -> NDArray[np.int32]:
    """The vector of a launch; unused places draw for nobody."""
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    number = len(kept.members)
    view["row"][:number], view["row"][number:] = kept.row, rows.num_rows
    view["position"][:number] = kept.context_len
    for name in _PER_ROW:
        view[name][:number] = getattr(rows, name)[kept.row]
    return vector


def kind_of_draws(vector: NDArray[np.int32], layout: VectorLayout) -> Kind:
    """What a launch asks for at most; unused places ask for nothing."""
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
    view["repetition"][number:] = 1
    for name in _EXTRAS_PER_ROW:
        view[name][:number] = getattr(rows, name)[kept.row]
    for place, target in enumerate(kept.targets):
        if target is not None:
            view["has_target"][place], view["target"][place] = 1, target
        view["wants_logprobs"][place] = target is not None or rows.logprobs[kept.row[place]] is not None
    return vector


def pack_masks(masks: Sequence[TokenSet | None], num_places: int, num_columns: int) -> NDArray[np.int32]:
    """Sets of ids as words `[B, V / 32]`; None allows everything, and so do unused places.

    Args:
        masks: of the places in use.
        num_places: B.
        num_columns: V, a multiple of 32.
    """
    words = np.full((num_places, num_columns // WORD), -1, np.int32)
    everything = (1 << num_columns) - 1
    for place, allowed in enumerate(masks):
        if allowed is not None:
            words[place] = np.frombuffer((allowed & everything).to_bytes(num_columns // 8, "little"), "<i4")
    return words
