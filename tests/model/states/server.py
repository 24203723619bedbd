"""The least engine for models with states: pages and states of some requests, and launches of any mix of tokens.

It has no scheduler: a test says how many tokens of each request a launch has. A request's state goes to another block
with every launch, so that the block before is a snapshot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from orca_jax.kernels.kv_pages import KVPages, pages_shape, pages_spec
from orca_jax.kernels.ragged_attention import (
    NO_WINDOW,
    RowArrays,
    Scores,
    prepare,
    write_and_attend,
)
from orca_jax.kernels.state_rows import StateRows
from orca_jax.model.mixers.base import Index, StatePools
from orca_jax.model.mixers.states import STATES
from orca_jax.model.sharding import TENSOR_AXIS, partition_spec
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import PAGED_MIXERS, MixerName

# of a launch, and of the pools of one layer
TOKENS, ROWS, PAGES, PAGE_SIZE, BLOCKS = 16, 4, 20, 4, 12


class Caches(NamedTuple):
    """The pages of all layers with attention, and the states of all others, by mixer."""

    pages: KVPages
    states: dict[MixerName, StatePools]


@dataclass(frozen=True)
class Access:
    """The `Mixing` of a launch."""

    model: ModelConfig  # of the stage
    mesh: Mesh
    requests: RowArrays
    rows: StateRows
    backend: str

    def attend(
        self,
        layer: Index,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Caches,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches]:
        assert k is not None and sinks is None
        windows = [kind.window or NO_WINDOW for kind in self.model.layers]
        has_windows = set(windows) != {NO_WINDOW}
        heads, pages = (
            PartitionSpec(None, TENSOR_AXIS, None),
            pages_spec("head_major", TENSOR_AXIS, jnp.dtype("float32"), has_values=v is not None),
        )

        def on_shard(
            q: Any, k: Any, v: Any, pages: Any, requests: Any, first: Any, window: Any
        ) -> Any:
            scores, device = Scores(self.model.score_scale), jax.devices()[0]
            if has_windows:
                scores = scores.with_window(window)
            prepared = prepare(device, q, pages, requests, self.backend)
            return write_and_attend(
                device, q, k, v, pages, prepared, first, scores, implementation=self.backend
            )

        split = jax.shard_map(
            on_shard,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, pages, *(PartitionSpec(),) * 3),
            out_specs=(heads, pages),
            check_vma=False,
        )
        window = jnp.array(windows, jnp.int32)[layer]
        out, after = split(
            q,
            k,
            v,
            cache.pages,
            self.requests,
            self._rank(_paged(self.model), layer) * PAGES,
            window,
        )
        return out, cache._replace(pages=after)

    def advance(
        self, layer: Index, mixer: MixerName, arrays: tuple[jax.Array, ...], cache: Caches
    ) -> tuple[jax.Array, Caches]:
        rows = self.rows.of_layer(self._rank(mixer, layer) * BLOCKS)
        out, after = STATES[mixer].on_mesh(self.model, self.mesh)(
            *arrays, cache.states[mixer], rows
        )
        return out, cache._replace(states={**cache.states, mixer: after})

    def _rank(self, name: MixerName, layer: Index) -> jax.Array:
        """The index of a layer among those with its mixer."""
        layers = self.model.layers_with(name)
        return jnp.array(
            [sum(other < each for other in layers) for each in range(self.model.num_layers)]
        )[layer]


def _paged(model: ModelConfig) -> MixerName:
    """The mixer of the layers with pages."""
    return next((mixer for mixer in model.mixers if mixer in PAGED_MIXERS), "attention")


@dataclass
class Live:
    """A request: its tokens so far, its pages, and the block with its state."""

    number: int
    length: int = 0
    block: int = 0
    pages: list[int] = field(default_factory=list)


class Server:
    """Runs a decoder, or its stages one after the other."""

    def __init__(
        self,
        stages: Sequence[Decoder],
        mesh: Mesh,
        backend: str = "xla",
        page_size: int = PAGE_SIZE,
    ) -> None:
        self.stages, self.mesh, self.page_size = stages, mesh, page_size
        self.caches = [allocate(decoder.of_stage, mesh, page_size) for decoder in stages]
        split = [nnx.split(decoder) for decoder in stages]
        self.reset([state for _, state in split])
        self._run = [jax.jit(partial(run_stage, graph, mesh, backend)) for graph, _ in split]

    def launch(
        self, tokens: Mapping[int, Sequence[int]], sources: Mapping[int, int] | None = None
    ) -> dict[int, Any]:
        """Log probabilities after each of the next tokens of some requests. `sources` replaces the blocks read."""
        live = [self.requests.setdefault(number, Live(number)) for number in tokens]
        live.sort(key=lambda request: len(tokens[request.number]) > 1)  # single tokens first
        ids = [token for request in live for token in tokens[request.number]]
        positions, columns = [], []
        for request in live:
            size = len(tokens[request.number])
            after = request.length + size
            request.pages += [
                self._free_pages.pop()
                for _ in range(-(-after // self.page_size) - len(request.pages))
            ]
            target = self._free_blocks.pop(0)
            source = (sources or {}).get(request.number, request.block)
            columns.append((len(positions), size, after, source, target, request.length == 0))
            positions += range(request.length, after)
            request.length, request.block = after, target
        out = self._call(
            ids, positions, np.array(columns, np.int32).T, [request.pages for request in live]
        )
        starts = {request.number: column[0] for request, column in zip(live, columns, strict=True)}
        return {
            number: out[start : start + len(tokens[number])] for number, start in starts.items()
        }

    def reset(self, weights: Sequence[Any]) -> None:
        """Begin without requests, and with these weights."""
        self.weights, self.requests = list(weights), dict[int, Live]()
        self._free_pages, self._free_blocks = list(range(PAGES)), list(range(BLOCKS))

    def free(self, block: int) -> None:
        """Let another request have a block."""
        self._free_blocks.append(block)

    def _call(
        self, ids: Any, positions: Any, columns: np.ndarray, pages: Sequence[Sequence[int]]
    ) -> np.ndarray:
        padded = np.zeros((columns.shape[0], ROWS), np.int32)
        padded[:, : columns.shape[1]] = columns
        start, size, after, source, target, is_fresh = padded
        table = np.zeros((ROWS, PAGES), np.int32)
        for row, own in enumerate(pages):
            table[row, : len(own)] = own
        requests = RowArrays(table, start, size, after)
        rows = StateRows(start, size, source, target, is_fresh != 0)
        x = np.zeros(TOKENS, np.int32)
        x[: len(ids)] = ids
        at = np.zeros(TOKENS, np.int32)
        at[: len(positions)] = positions
        for number, run in enumerate(self._run):
            x, self.caches[number] = run(
                self.weights[number], x, at, self.caches[number], requests, rows
            )
        return np.asarray(x)


def run_stage(
    graph: Any,
    mesh: Mesh,
    backend: str,
    state: Any,
    x: Any,
    positions: Any,
    caches: Caches,
    requests: Any,
    rows: Any,
) -> tuple[jax.Array, Caches]:
    decoder: Decoder = nnx.merge(graph, state)
    access = Access(decoder.of_stage, mesh, RowArrays(*map(jnp.asarray, requests)), rows, backend)
    hidden, caches = decoder.run_layers(x, positions, access, caches)
    if decoder.span.is_last:
        hidden = jax.nn.log_softmax(decoder.unembed(hidden)[:, : decoder.config.vocab_size])
    return hidden, caches


def run_one(decoder: Decoder, ids: jax.Array, keep: jax.Array | None) -> jax.Array:
    """Hidden vectors of one request's first tokens."""
    mesh, size = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,)), jnp.array([len(ids)], jnp.int32)
    zero = jnp.zeros(1, jnp.int32)
    requests = RowArrays(jnp.arange(PAGES, dtype=jnp.int32)[None], zero, size, size)
    access = Access(
        decoder.of_stage,
        mesh,
        requests,
        StateRows(zero, size, zero, zero, jnp.array([True])),
        "xla",
    )
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    return decoder.run_layers(ids, positions, access, allocate(decoder.of_stage, mesh), keep)[0]


def allocate(model: ModelConfig, mesh: Mesh, page_size: int = PAGE_SIZE) -> Caches:
    """Pages and states of NaN."""
    float32 = jnp.dtype("float32")
    num_pages = PAGES * max(1, len(model.layers_with(_paged(model))))
    heads, dim, has_values = model.page_shape
    shapes = pages_shape(
        "head_major", num_pages, heads, dim, page_size, float32, has_values=has_values
    )

    def filled(shape: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(np.full(shape.shape, np.nan, np.float32), NamedSharding(mesh, spec))

    pages = jax.tree.map(
        filled, shapes, pages_spec("head_major", TENSOR_AXIS, float32, has_values=has_values)
    )
    states: dict[MixerName, StatePools] = {}
    for name in sorted(STATES.keys() & {*model.mixers}):
        number = BLOCKS * len(model.layers_with(name))
        states[name] = tuple(
            filled(
                jax.ShapeDtypeStruct((number, *array.shape), float32),
                partition_spec((None, *array.axes)),
            )
            for array in STATES[name].states(model)
        )
    return Caches(pages, states)
