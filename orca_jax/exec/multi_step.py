"""Several iterations in one dispatch: each draws its tokens and feeds them to the next, without the host.

The loop ends by itself: after as many repetitions as the plan says, when all members have stopped, or, where somebody
waits for what they would give back, when the first one has. A member that has stopped repeats its last token at its
place, which writes the same K and V again; so the batch keeps its shape, and nothing branches on who is still there.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int
from numpy.typing import NDArray

from orca_jax.config import ExecutorConfig, ModelConfig
from orca_jax.exec.layers import Weights, first_ids, make_layers
from orca_jax.exec.pack import Batch, Kept, Layout
from orca_jax.exec.rows import RowTable
from orca_jax.exec.sampling.draw import sample
from orca_jax.exec.sampling.pack import Draws, draws_layout, unpack_draws
from orca_jax.exec.sampling.programs import Unembed
from orca_jax.exec.vector import VectorLayout
from orca_jax.kernels.kv_pages import KVPages
from orca_jax.model.transformer import Decoder
from orca_jax.step import MAX_STOP_IDS, StepPlan


class Limits(NamedTuple):
    """When a launch's members stop. Places without a member have stopped already."""

    most_steps: Int[Array, " T"]
    num_untold: Int[Array, " T"]  # tokens of the row that are on the device and in no result
    stop_ids: Int[Array, "T S"]
    num_steps: Int[Array, " 1"]
    yields: Int[Array, " 1"]


class Repeated(NamedTuple):
    """Results of a dispatch."""

    num_steps: Int[Array, ""]
    taken: Int[Array, " T"]  # repetitions in which each place drew
    ended: Bool[Array, " T"]  # by a stop id, or by logits that were not finite
    finite: Bool[Array, " T"]


class State(NamedTuple):
    """What a repetition hands to the next."""

    pages: KVPages
    history: Int[Array, "R L"]
    last_token: Int[Array, " R"]
    untold: Int[Array, "R K"]
    ids: Int[Array, " T"]  # that the next repetition processes
    offset: Int[Array, " T"]  # by how many positions it is further than the first
    result: Repeated


def limits_layout(num_tokens: int) -> VectorLayout:
    """Of the vector that a dispatch sends beside those of layers and sampler."""
    per_place = dict.fromkeys(("most_steps", "num_untold"), (num_tokens,))
    return VectorLayout({**per_place, "stop_ids": (num_tokens, MAX_STOP_IDS), "num_steps": (1,), "yields": (1,)})


def pack_limits(plan: StepPlan, kept: Kept, rows: RowTable, layout: VectorLayout) -> NDArray[np.int32]:
    """The vector of a plan whose members are all kept, in `kept`'s order."""
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    number = len(kept.members)
    view["most_steps"][:number] = [plan.members[index].most_steps for index in kept.members]
    view["num_untold"][:number] = rows.num_untold[kept.row]
    view["stop_ids"][:number] = rows.stop_ids[kept.row]
    view["num_steps"][0], view["yields"][0] = plan.num_steps, plan.yields
    return vector


def make_repeat(
    structure: Callable[[Weights], Decoder],
    unembed: Unembed,
    model: ModelConfig,
    config: ExecutorConfig,
    layout: Layout,
    mesh: Mesh,
) -> Callable[..., tuple[KVPages, jax.Array, jax.Array, jax.Array, Repeated]]:
    """The program of one bucket: layers and plain sampler, repeated.

    `(weights, unembedding, pages, history, last_token, untold [R, K], vector, draws, limits) -> (pages, history,
    last_token, untold, repeated)`, where `untold` holds what each row drew since its last telling.

    Args:
        structure: puts a decoder together from its weights.
        unembed: puts the unembedding together from its weights.
        model: of the decoder.
        config: cache and attention.
        layout: of `vector`; draws and limits have a place for each of its tokens.
        mesh: of weights and pages.
    """
    layers = make_layers(structure, model, config, mesh)
    size = layout.num_tokens

    def program(
        weights: Weights,
        unembedding: Weights,
        pages: KVPages,
        history: jax.Array,
        last_token: jax.Array,
        untold: jax.Array,
        vector: jax.Array,
        draws_vector: jax.Array,
        limits_vector: jax.Array,
    ) -> tuple[KVPages, jax.Array, jax.Array, jax.Array, Repeated]:
        def iterate(
            batch: Batch, draws: Draws, pages: KVPages, history: jax.Array, ids: jax.Array
        ) -> tuple[KVPages, jax.Array, jax.Array, jax.Array]:
            pages, history, hidden = layers(weights, pages, history, batch, ids)
            hidden = jnp.pad(hidden, ((0, size - layout.num_kept), (0, 0)))
            with jax.named_scope("sampling"):
                logits = unembed(unembedding).scores(hidden)
                tokens, finite = sample(logits, draws.parameters, vocab_size=model.vocab_size, mesh=mesh)
            return pages, history, tokens, finite

        batch = layout.unpack(vector)
        draws = unpack_draws(draws_layout(size), draws_vector)
        limits = Limits(**limits_layout(size).unpack(limits_vector))
        ids, offset = first_ids(batch, last_token), jnp.zeros(size, jnp.int32)
        state = State(pages, history, last_token, untold, ids, offset, nothing_yet(size))
        end = repeat(iterate, batch, draws, limits, state)
        return end.pages, end.history, end.last_token, end.untold, end.result

    return program


Iterate = Callable[
    [Batch, Draws, KVPages, jax.Array, Int[Array, " T"]],
    tuple[KVPages, jax.Array, Int[Array, " T"], Bool[Array, " T"]],
]
"""`(batch, draws, pages, history, ids) -> (pages, history, tokens, finite)`: one iteration of a batch of increments."""


def repeat(iterate: Iterate, batch: Batch, draws: Draws, limits: Limits, state: State) -> State:
    """Iterate until the limits say stop.

    Args:
        iterate: all layers, and the sampler.
        batch: of the first repetition; one token for each member, all kept, in order.
        draws: of the first repetition.
        limits: of the members.
        state: before the first repetition; its result counts nothing.
    """
    num_rows, longest = state.untold.shape

    def drawing(result: Repeated) -> Bool[Array, " T"]:
        return ~result.ended & (result.taken < limits.most_steps)

    def goes_on(state: State) -> Bool[Array, ""]:
        active = drawing(state.result)
        may = active.any() & (state.result.num_steps < limits.num_steps[0])
        is_member = limits.most_steps > 0
        return may & ~((limits.yields[0] > 0) & (is_member & ~active).any())

    def step(state: State) -> State:
        active = drawing(state.result)
        parameters = draws.parameters._replace(position=draws.parameters.position + state.offset)
        pages, history, tokens, finite = iterate(
            _moved(batch, state.offset), draws._replace(parameters=parameters), state.pages, state.history, state.ids
        )
        row = jnp.where(active, draws.row, num_rows)  # R, and so dropped, where nothing was drawn
        column = jnp.minimum(limits.num_untold + state.result.taken, longest - 1)
        is_stop = (tokens[:, None] == limits.stop_ids).any(axis=1)
        result = Repeated(
            num_steps=state.result.num_steps + 1,
            taken=state.result.taken + active.astype(jnp.int32),
            ended=state.result.ended | (active & (is_stop | ~finite)),
            finite=state.result.finite & (finite | ~active),
        )
        again = drawing(result)
        return State(
            pages=pages,
            history=history,
            last_token=state.last_token.at[row].set(tokens, mode="drop"),
            untold=state.untold.at[row, column].set(tokens, mode="drop"),
            ids=jnp.where(again, tokens, state.ids),
            offset=state.offset + again.astype(jnp.int32),
            result=result,
        )

    return lax.while_loop(goes_on, step, state)


def nothing_yet(num_places: int) -> Repeated:
    """The result before the first repetition."""
    nobody = jnp.zeros(num_places, bool)
    return Repeated(jnp.zeros((), jnp.int32), jnp.zeros(num_places, jnp.int32), nobody, ~nobody)


def _moved(batch: Batch, offset: Int[Array, " T"]) -> Batch:
    """The same increments some positions further. Requests stand in the order of their tokens, the absent ones last."""
    num_tokens, num_rows = offset.shape[0], batch.query_len.shape[0]
    by_request = jnp.pad(offset, (0, max(0, num_rows - num_tokens)))[:num_rows]
    return batch._replace(positions=batch.positions + offset, context_len=batch.context_len + by_request)
