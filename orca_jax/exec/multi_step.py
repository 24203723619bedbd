"""Many steps in one dispatch: each step draws its tokens and feeds them to the next one, without the host.

The loop ends by itself: after the number of steps in the plan, when all members have stopped, or, if the plan stops
early, when the first one has. A stopped member repeats its last token at the same position, and writes the same keys
and values again. So the batch keeps its shape, and nothing branches on the remaining members.
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
from orca_jax.exec.pack import Batch, Kept, Layout, VectorLayout
from orca_jax.exec.rows import RowTable
from orca_jax.exec.sampling.draw import sample
from orca_jax.exec.sampling.pack import Draws, draws_layout, unpack_draws
from orca_jax.exec.sampling.programs import Unembed
from orca_jax.kernels.kv_pages import KVPages
from orca_jax.model.transformer import Decoder
from orca_jax.step import MAX_STOP_IDS, MultiStep


class Limits(NamedTuple):
    """Conditions for the end of each member of a launch. Places without a member have stopped from the start."""

    most_steps: Int[Array, " T"]
    num_unreported: Int[Array, " T"]  # tokens of the row on the device, in no result yet
    stop_ids: Int[Array, "T S"]
    num_steps: Int[Array, " 1"]
    stops_early: Int[Array, " 1"]


class ManyDrawn(NamedTuple):
    """Results of a dispatch."""

    num_steps: Int[Array, ""]
    num_drawn: Int[Array, " T"]  # steps in which each place drew a token
    ended: Bool[Array, " T"]  # by a stop id, or by logits that were not finite
    finite: Bool[Array, " T"]


class LoopState(NamedTuple):
    """The values carried from step to step."""

    pages: KVPages
    history: Int[Array, "R L"]
    last_token: Int[Array, " R"]
    unreported: Int[Array, "R K"]
    ids: Int[Array, " T"]  # the input of the next step
    offset: Int[Array, " T"]  # positions between the first step and the next one
    result: ManyDrawn


def limits_layout(num_tokens: int) -> VectorLayout:
    """The layout of the vector of limits, sent beside the vectors of layers and sampler."""
    per_place = dict.fromkeys(("most_steps", "num_unreported"), (num_tokens,))
    return VectorLayout({**per_place, "stop_ids": (num_tokens, MAX_STOP_IDS), "num_steps": (1,), "stops_early": (1,)})


def pack_limits(plan: MultiStep, kept: Kept, rows: RowTable, layout: VectorLayout) -> NDArray[np.int32]:
    """The vector of a plan with one kept token for each member, in the order of `kept`."""
    vector = np.zeros(layout.size, np.int32)
    view = layout.views(vector)
    number = len(kept.members)
    view["most_steps"][:number] = [plan.limits[index].most_steps for index in kept.members]
    view["num_unreported"][:number] = rows.num_unreported[kept.row]
    view["stop_ids"][:number] = rows.stop_ids[kept.row]
    view["num_steps"][0], view["stops_early"][0] = plan.num_steps, plan.stops_early
    return vector


def make_multi_step(
    structure: Callable[[Weights], Decoder],
    unembed: Unembed,
    model: ModelConfig,
    config: ExecutorConfig,
    layout: Layout,
    mesh: Mesh,
) -> Callable[..., tuple[KVPages, jax.Array, jax.Array, jax.Array, ManyDrawn]]:
    """The program of one bucket: layers and plain sampler, in a loop.

    `(weights, unembedding, pages, history, last_token, unreported [R, K], vector, draws, limits) -> (pages, history,
    last_token, unreported, drawn)`, where `unreported` has the tokens of each row in no result yet.

    Args:
        structure: builds a decoder from its weights.
        unembed: builds the unembedding from its weights.
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
        unreported: jax.Array,
        vector: jax.Array,
        draws_vector: jax.Array,
        limits_vector: jax.Array,
    ) -> tuple[KVPages, jax.Array, jax.Array, jax.Array, ManyDrawn]:
        def iterate(
            batch: Batch, draws: Draws, pages: KVPages, history: jax.Array, ids: jax.Array
        ) -> tuple[KVPages, jax.Array, jax.Array, jax.Array]:
            pages, longer, hidden = layers(weights, pages, history, batch, ids, None)
            assert longer is not None, "a model in one stage has a history"
            hidden = jnp.pad(hidden, ((0, size - layout.num_kept), (0, 0)))
            with jax.named_scope("sampling"):
                logits = unembed(unembedding).scores(hidden)
                tokens, finite = sample(logits, draws.parameters, vocab_size=model.vocab_size, mesh=mesh)
            return pages, longer, tokens, finite

        batch = layout.unpack(vector)
        draws = unpack_draws(draws_layout(size), draws_vector)
        limits = Limits(**limits_layout(size).unpack(limits_vector))
        ids, offset = first_ids(batch, last_token), jnp.zeros(size, jnp.int32)
        state = LoopState(pages, history, last_token, unreported, ids, offset, nothing_yet(size))
        end = run_steps(iterate, batch, draws, limits, state)
        return end.pages, end.history, end.last_token, end.unreported, end.result

    return program


Iterate = Callable[
    [Batch, Draws, KVPages, jax.Array, Int[Array, " T"]],
    tuple[KVPages, jax.Array, Int[Array, " T"], Bool[Array, " T"]],
]
"""`(batch, draws, pages, history, ids) -> (pages, history, tokens, finite)`: one iteration of a batch of increments."""


def run_steps(iterate: Iterate, batch: Batch, draws: Draws, limits: Limits, state: LoopState) -> LoopState:
    """Iterate until the limits end the loop.

    Args:
        iterate: all layers, and the sampler.
        batch: of the first step; one token for each member, all kept, in order.
        draws: of the first step.
        limits: of the members.
        state: before the first step, with `nothing_yet` as its result.
    """
    num_rows, longest = state.unreported.shape

    def drawing(result: ManyDrawn) -> Bool[Array, " T"]:
        return ~result.ended & (result.num_drawn < limits.most_steps)

    def continues(state: LoopState) -> Bool[Array, ""]:
        active = drawing(state.result)
        may = active.any() & (state.result.num_steps < limits.num_steps[0])
        is_member = limits.most_steps > 0
        return may & ~((limits.stops_early[0] > 0) & (is_member & ~active).any())

    def step(state: LoopState) -> LoopState:
        active = drawing(state.result)
        parameters = draws.parameters._replace(position=draws.parameters.position + state.offset)
        pages, history, tokens, finite = iterate(
            _moved(batch, state.offset), draws._replace(parameters=parameters), state.pages, state.history, state.ids
        )
        row = jnp.where(active, draws.row, num_rows)  # R, so that it is dropped, if no token was drawn
        column = jnp.minimum(limits.num_unreported + state.result.num_drawn, longest - 1)
        is_stop = (tokens[:, None] == limits.stop_ids).any(axis=1)
        result = ManyDrawn(
            num_steps=state.result.num_steps + 1,
            num_drawn=state.result.num_drawn + active.astype(jnp.int32),
            ended=state.result.ended | (active & (is_stop | ~finite)),
            finite=state.result.finite & (finite | ~active),
        )
        again = drawing(result)
        return LoopState(
            pages=pages,
            history=history,
            last_token=state.last_token.at[row].set(tokens, mode="drop"),
            unreported=state.unreported.at[row, column].set(tokens, mode="drop"),
            ids=jnp.where(again, tokens, state.ids),
            offset=state.offset + again.astype(jnp.int32),
            result=result,
        )

    return lax.while_loop(continues, step, state)


def nothing_yet(width: int) -> ManyDrawn:
    """The result before the first step."""
    none = jnp.zeros(width, bool)
    return ManyDrawn(jnp.zeros((), jnp.int32), jnp.zeros(width, jnp.int32), none, ~none)


def _moved(batch: Batch, offset: Int[Array, " T"]) -> Batch:
    """The same increments some positions later. Requests are in the order of their tokens, absent ones last."""
    num_tokens, num_rows = offset.shape[0], batch.requests.query_len.shape[0]
    by_request = jnp.pad(offset, (0, max(0, num_rows - num_tokens)))[:num_rows]
    positions = batch.positions + offset
    requests = batch.requests._replace(context_len=batch.requests.context_len + by_request)
    return batch._replace(positions=positions, requests=requests)
