"""One iteration on the device: the program of all layers, compiled once for each bucket.

Token-wise operations run on all tokens of the merged batch; attention alone is split by request, inside one call
(paper section 3.2). The sampler is its own program, with the unembedding, and gets the kept tokens only
(`sampling/programs.py`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.exec.buckets import sampler_width
from orca_jax.exec.cache import cache_spec, group_shape
from orca_jax.exec.pack import Batch, Layout
from orca_jax.exec.states import CacheAccess, Caches, PagePools
from orca_jax.kernels.kv_pages import KVPages, like, viewed
from orca_jax.kernels.ragged_attention import (
    NO_WINDOW,
    BackendChoice,
    RowArrays,
    Scores,
    attend_pages,
    choose_backend,
    explain_choice,
    prepare,
    write_and_attend,
)
from orca_jax.model.block import AttentionOnly
from orca_jax.model.lora.launch import Adapters
from orca_jax.model.lora.stacks import groups_of, stack_names
from orca_jax.model.mixers.base import Attend
from orca_jax.model.sharding import HEADS_SPEC, TENSOR_AXIS
from orca_jax.model.transformer import Decoder
from orca_jax.values.cache_spec import LayerGroup, pages_in_one, pool_shape
from orca_jax.values.config import ExecutorConfig, ModelConfig
from orca_jax.values.platforms import platform_of

Weights = Sequence[jax.Array]


Forward = Callable[
    [Weights, Caches, jax.Array | None, jax.Array | None, jax.Array],
    tuple[Caches, jax.Array | None, jax.Array],
]
"""Caches and history stay on the device between iterations, donated from one to the next."""


def make_forward(
    structure: Callable[[Weights], Decoder],
    model: ModelConfig,
    config: ExecutorConfig,
    layout: Layout,
    mesh: Mesh,
) -> Forward:
    """The program of one bucket: `(weights, caches, history, inputs, vector) -> (caches, history, hidden)`.

    `hidden [B, E]` has the vectors of the kept tokens, padded to the width of the largest sampler. `history [R, L]` has
    the ids of each row's context by position, up to the last processed one. `inputs` is `last_token [R]`.

    In a pipeline only the last stage is this program. The others return `hidden [T, E]`, all tokens, and the next
    stage takes them as `inputs`. The first one gets None, and the host has all ids. `history` is None.

    Args:
        structure: builds a decoder from its weights.
        model: the model of the decoder.
        config: cache and attention.
        layout: the layout of `vector`.
        mesh: the mesh of weights and caches.
    """
    layers = make_layers(structure, model, config, mesh)

    def forward(
        weights: Weights,
        caches: Caches,
        history: jax.Array | None,
        inputs: jax.Array | None,
        vector: jax.Array,
    ) -> tuple[Caches, jax.Array | None, Float[Array, "B E"]]:
        batch = layout.unpack(vector)
        is_first = inputs is None or inputs.ndim == 1
        ids = batch.ids
        if is_first and inputs is not None:
            ids = first_ids(batch, inputs)
        if is_first:
            inputs = None
        caches, history, hidden = layers(weights, caches, history, batch, ids, inputs)
        if history is not None:
            width = sampler_width(config.num_rows + config.num_drafts)
            hidden = jnp.pad(hidden, ((0, width - layout.num_kept), (0, 0)))
        return caches, history, hidden

    return forward


def first_ids(batch: Batch, last_token: Int[Array, " R"]) -> Int[Array, " T"]:
    """The input ids of a launch, including ids on the device only."""
    return jnp.where(batch.on_device, last_token[batch.token_row], batch.ids)


Layers = Callable[
    [Weights, Caches, jax.Array | None, Batch, jax.Array, jax.Array | None],
    tuple[Caches, jax.Array | None, jax.Array],
]
"""The layers of a stage: `(weights, caches, history, batch, ids [T], inputs [T, E]) -> (caches, history, hidden)`.

`inputs` is the result of the stage before, in all stages after the first one. Only the last stage has a history, and
returns the hidden vectors of the kept tokens alone.
"""


def make_layers(
    structure: Callable[[Weights], Decoder], model: ModelConfig, config: ExecutorConfig, mesh: Mesh
) -> Layers:
    """Make the function of all layers over one batch, from the arguments of `make_forward`.

    If the batch has slots of adapters, the adapters follow the weights of the decoder.
    """

    def layers(
        weights: Weights,
        caches: Caches,
        history: jax.Array | None,
        batch: Batch,
        ids: Int[Array, " T"],
        inputs: Float[Array, "T E"] | None,
    ) -> tuple[Caches, jax.Array | None, Float[Array, "K E"]]:
        keep = None
        if history is not None:
            history = history.at[batch.token_row, batch.positions].set(ids, mode="drop")
            keep = batch.kept_token
        attend = _make_attend(batch, model, config, mesh)
        options: dict[str, Any] = {"keep": keep}
        if batch.slot is not None:
            groups = groups_of(model)
            names = stack_names(model)
            weights, stacks = (
                weights[: -len(names)],
                dict(zip(names, weights[-len(names) :], strict=True)),
            )
            options["adapters"] = Adapters(stacks, groups, batch.slot, mesh, keep)
        decoder = structure(weights)
        if inputs is None:
            inputs = ids
        if decoder.is_packed:
            options["num_tokens"] = jnp.sum(batch.requests[0].query_len, dtype=jnp.int32)
        places = batch.positions
        if batch.states is None:  # no layer keeps states
            pages_alone = AttentionOnly(attend)
            hidden, pages = decoder.run_layers(inputs, places, pages_alone, caches.pages, **options)
            return caches._replace(pages=pages), history, hidden
        mixing = CacheAccess(attend, model, mesh, batch.states, config.cache.num_states)
        hidden, caches = decoder.run_layers(inputs, places, mixing, caches, **options)
        return caches, history, hidden

    return layers


def _make_attend(
    batch: Batch, model: ModelConfig, config: ExecutorConfig, mesh: Mesh
) -> Attend[PagePools]:
    """Attention of one layer over this batch: write new keys and values, then split by request; sharded over heads."""
    groups = config.cache.groups
    scores = Scores(model.score_scale, soft_cap=model.attention_soft_cap)
    paged = [layer for layer in model.layer_caches if layer is not None]
    sources = [model.layer_caches[model.layer_of_pages(layer)] for layer in range(model.num_layers)]
    windows = [(source or paged[0]).window for source in sources] if paged else []
    # From the mesh, because programs are also compiled for absent devices.
    device = mesh.devices.flat[0]

    @cache
    def backend_of(group: LayerGroup) -> str:
        shapes = _on_one_device(batch.ids.shape[0], model, config, mesh, group)
        wanted = config.attention_implementation
        return choose_backend(device, *shapes, wanted, has_library=config.has_library).name

    def prepare_group(group: LayerGroup, requests: RowArrays) -> Any:
        shapes = _on_one_device(batch.ids.shape[0], model, config, mesh, group)
        return prepare(device, *shapes, requests, backend_of(group))

    of_layer = _prepared_by_layer(batch, groups, prepare_group)

    @cache
    def split(group: LayerGroup) -> Callable[..., tuple[Array, KVPages]]:
        return _attention_of_group(config, mesh, group, backend_of(group))

    def attend(
        layer: int | Int[Array, ""],
        q: Array,
        k: Array | None,
        v: Array | None,
        pages: PagePools,
        sinks: Array | None = None,
    ) -> tuple[Float[Array, "T H D"], PagePools]:
        own = scores.with_window(window_of_layer(windows, layer))
        if k is None:
            assert isinstance(layer, int), "layers with the pages of others are unrolled"
            layer = model.layer_of_pages(layer)
        group, index, prepared = of_layer(layer)
        with jax.named_scope("attention"):
            out, new = split(group)(index, own, prepared, q, k, v, sinks, pages[group.pool])
        has_several = isinstance(layer, int) and len(groups) > 1
        if (has_several or len(model.mixers) > 1) and platform_of(device).copies_pools:
            out, new = jax.lax.optimization_barrier((out, new))
        return out, (*pages[: group.pool], new, *pages[group.pool + 1 :])

    return attend


def _attention_of_group(
    config: ExecutorConfig, mesh: Mesh, group: LayerGroup, name: str
) -> Callable[..., tuple[Array, KVPages]]:
    """Attention on all shards by the backend of a name, for groups with the shape and the pool of this one."""
    groups = config.cache.groups
    # From the mesh, because programs are also compiled for absent devices.
    device = mesh.devices.flat[0]
    everywhere = PartitionSpec()
    by_head = cache_spec(config.cache)[group.pool]

    def on_shard(
        index: Int[Array, ""],
        scores: Scores,
        prepared: Any,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"] | None,
        v: Float[Array, "T K D"] | None,
        sinks: Float[Array, " H"] | None,
        pages: KVPages,
    ) -> tuple[Float[Array, "T H D"], KVPages]:
        scores = dataclasses.replace(scores, sinks=sinks)
        num_blocks = config.cache.num_blocks[group.pool]
        parts = pages_in_one(group, groups)
        is_stored = group.shape == pool_shape(groups, group.pool)
        first = index * num_blocks
        own = pages
        if not is_stored:
            heads = group.shape.num_kv_heads // mesh.shape[TENSOR_AXIS]
            first = index // parts * num_blocks * parts + index % parts
            own = viewed(pages, heads, group.shape.head_dim)
        if k is None:
            return attend_pages(device, q, own, prepared, first, scores, implementation=name), pages
        out, own = write_and_attend(
            device, q, k, v, own, prepared, first, scores, implementation=name
        )
        if not is_stored:
            own = like(own, pages)
        return out, own

    split: Callable[..., tuple[Array, KVPages]] = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(*(everywhere,) * 3, *(HEADS_SPEC,) * 3, PartitionSpec(TENSOR_AXIS), by_head),
        out_specs=(HEADS_SPEC, by_head),
        check_vma=False,  # a loop whose trip count is the same on all shards needs no collective
    )
    return split


def _prepared_by_layer(
    batch: Batch,
    groups: Sequence[LayerGroup],
    prepare_group: Callable[[LayerGroup, RowArrays], Any],
) -> Callable[[int | Int[Array, ""]], tuple[LayerGroup, Int[Array, ""], Any]]:
    """Prepare the data of each group; returns a function to a layer's group, its index in it, and the group's data.

    For a traced layer, the data of several groups are stacked, with page tables as wide as the widest one. Their pages
    then have one shape and one pool, and the group is any of them.
    """
    requests: list[RowArrays] = []
    for group, rows in zip(groups, batch.requests, strict=True):
        parts = pages_in_one(group, groups)
        if parts > 1:
            rows = rows._replace(page_table=rows.page_table * parts)
        requests.append(rows)
    own = [prepare_group(*each) for each in zip(groups, requests, strict=True)]
    places: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        places |= {layer: (number, index) for index, layer in enumerate(group.layers)}
    if len(groups) == 1 and groups[0].layers == tuple(range(len(places))):
        return lambda layer: (groups[0], jnp.int32(layer), own[0])
    # Layers without pages have a place too, which is not used.
    every = [places.get(layer, (0, 0)) for layer in range(max(places, default=-1) + 1)]
    group_of = jnp.asarray([number for number, _ in every], jnp.int32)
    index_of = jnp.asarray([index for _, index in every], jnp.int32)
    is_uniform = len({(group.shape, group.pool) for group in groups}) == 1
    width = max(each.page_table.shape[1] for each in requests)
    wide = []
    for rows in requests:
        missing = width - rows.page_table.shape[1]
        wide.append(rows._replace(page_table=jnp.pad(rows.page_table, ((0, 0), (0, missing)))))
    stacked = None
    if is_uniform:
        stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *map(prepare_group, groups, wide))

    def of_layer(layer: int | Int[Array, ""]) -> tuple[LayerGroup, Int[Array, ""], Any]:
        if isinstance(layer, int):
            number, index = places[layer]
            return groups[number], jnp.int32(index), own[number]
        assert is_uniform, "layers with pages of several shapes must be unrolled"
        prepared = jax.tree.map(
            lambda each: jax.lax.dynamic_index_in_dim(each, group_of[layer], keepdims=False),
            stacked,
        )
        return groups[0], index_of[layer], prepared

    return of_layer


def window_of_layer(
    windows: Sequence[int | None], layer: int | Int[Array, ""]
) -> int | Int[Array, ""] | None:
    """The window of a layer.

    It is a constant if all windows are equal or the layer is an integer. Otherwise it is a traced scalar, so that one
    program of attention serves all layers.
    """
    if len(set(windows)) == 1:
        return windows[0]
    if isinstance(layer, int):
        return windows[layer]
    numbers = [NO_WINDOW if window is None else window for window in windows]
    return jnp.asarray(numbers, jnp.int32)[layer]


def explain_attention(model: ModelConfig, config: ExecutorConfig, mesh: Mesh) -> BackendChoice:
    """The implementation of attention in the programs of these shapes, and the reason for it.

    Raises:
        NotImplementedError: the configured implementation cannot do these shapes on this device.
    """
    device = mesh.devices.flat[0]
    shapes = _on_one_device(config.buckets[-1], model, config, mesh, config.cache.groups[0])
    return explain_choice(
        device, *shapes, config.attention_implementation, has_library=config.has_library
    )


def _on_one_device(
    num_tokens: int, model: ModelConfig, config: ExecutorConfig, mesh: Mesh, group: LayerGroup
) -> tuple[jax.ShapeDtypeStruct, KVPages]:
    """Shapes of a group's queries and pages on each device of the mesh."""

    def shard(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(x.shape), x.dtype)

    q = jax.ShapeDtypeStruct(
        (num_tokens, model.num_heads, group.shape.head_dim), jnp.dtype(config.dtype)
    )
    pages: KVPages = jax.tree.map(
        shard, group_shape(config.cache, group), cache_spec(config.cache)[group.pool]
    )
    return shard(q, HEADS_SPEC), pages


def flatten_module[M: nnx.Module](module: M) -> tuple[Callable[[Weights], M], list[Any]]:
    """Split a module into a function to rebuild it and its flat weights or shapes. A flat list is quick to pass."""
    graph, state = nnx.split(module)
    weights, tree = jax.tree.flatten(state)

    def structure(weights: Weights) -> M:
        merged: M = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        return merged

    return structure, weights
