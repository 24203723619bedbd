"""Layers with pages of several shapes: in one pool of blocks, viewed in either shape, and in pools of their own."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orca_jax.exec.cache import allocate_caches, cache_shape, stage_bytes, with_num_pages
from orca_jax.exec.compile import memory_of
from orca_jax.exec.layers import make_layers
from orca_jax.exec.pack import Layout
from orca_jax.exec.rows import RowTable
from orca_jax.kernels.kv_pages import LAYOUTS, HeadMajorPages
from orca_jax.model.load import tensor_mesh
from orca_jax.model.stages import whole
from orca_jax.values.cache_spec import LayerCache, PageShape, form_groups, one_group
from orca_jax.values.config import CacheConfig, ExecutorConfig, ModelConfig, PageDType, PageLayout
from orca_jax.values.layer_config import LayerKind
from orca_jax.values.step import Member
from tests.exec.test_executor import MODEL

WIDE, NARROW, WINDOW, PAGE_SIZE, HEADS = PageShape(4, 8), PageShape(1, 16), 6, 4, 4
LAYERS = tuple(
    LayerCache(NARROW) if layer % 3 == 2 else LayerCache(WIDE, WINDOW) for layer in range(6)
)
SHAPED: ModelConfig = replace(MODEL, layers=(LayerKind(WINDOW), LayerKind(WINDOW), LayerKind()) * 2)
TOKENS, LENGTH, CHUNK = 30, 64, 7


def heads_of(layer: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of all tokens in a layer."""
    shape, draw = LAYERS[layer].shape, np.random.default_rng(layer)
    sizes = ((TOKENS, HEADS, shape.head_dim), *[(TOKENS, *shape[:2])] * 2)
    query, key, value = (jnp.asarray(draw.normal(size=size), jnp.float32) for size in sizes)
    return query, key, value


def dense(layer: int) -> jax.Array:
    query, key, value = heads_of(layer)
    key, value = (jnp.repeat(x, HEADS // x.shape[1], axis=1) for x in (key, value))
    ahead = jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)
    visible = (ahead >= 0) & (ahead < (LAYERS[layer].window or TOKENS))
    scores = jnp.where(
        visible, jnp.einsum("thd,shd->hts", query, key) * SHAPED.score_scale, -jnp.inf
    )
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), value)


class Layers:
    """A decoder of attention alone; its result has all layers side by side."""

    is_packed = False

    def run_layers(
        self, ids: Any, positions: jax.Array, mixing: Any, pages: Any, keep: Any = None
    ) -> Any:
        outs = []
        for layer in range(6):
            out, pages = mixing.attend(layer, *(x[positions] for x in heads_of(layer)), pages)
            outs.append(out.reshape(out.shape[0], -1))
        return jnp.concatenate(outs, axis=1), pages


def structure(weights: Any) -> Any:
    return Layers()


def cache_of(layout: PageLayout, num_blocks: int, *, views: bool) -> CacheConfig:
    groups = form_groups(LAYERS, LENGTH, views=views)
    return with_num_pages(CacheConfig(groups, (), PAGE_SIZE, "float32", layout), num_blocks, LENGTH)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_without_values_have_one_array(layout: PageLayout, dtype: PageDType) -> None:
    """They have a pool of their own, and half of the bytes; the array of a copy of a head is on each device."""
    model = replace(MODEL, num_kv_heads=2, head_dim=16)
    latent = PageShape(2, 16, has_values=False)
    groups = form_groups([LayerCache(PageShape(2, 16)), LayerCache(latent)], LENGTH)
    assert sorted(group.pool for group in groups) == [0, 1]
    cache = CacheConfig(groups, (5, 5), 32, dtype, layout)
    mesh = tensor_mesh(jax.devices()[:2])
    config = ExecutorConfig("float32", 2, (8,), 1, LENGTH, cache)
    shapes, allocated = cache_shape(cache), allocate_caches(config, model, mesh).pages
    for group in groups:
        pages, array = shapes[group.pool], allocated[group.pool]
        assert jax.tree.map(lambda x: (x.shape, x.dtype), pages) == jax.tree.map(
            lambda x: (x.shape, x.dtype), array
        )
        if not group.shape.has_values:
            assert isinstance(array, HeadMajorPages) and array.v is None and array.v_scale is None
            assert array.k.sharding.shard_shape(array.k.shape) == (5, 1, 16, 32)
    both, one = (
        stage_bytes(
            CacheConfig(one_group([LayerCache(shape)]), (5,), 32, dtype, layout),
            whole(replace(model, layers=model.layers[:1])),
        )
        for shape in (PageShape(2, 16), latent)
    )
    # token-major pages have scales of pages, not of tokens
    if dtype == "float32" or layout == "head_major":
        assert both == 2 * one
    assert one == sum(
        x.nbytes
        for x in jax.tree.leaves(allocated[next(g.pool for g in groups if not g.shape.has_values)])
    )


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("layout", "views"),
    [
        ("head_major", True),
        pytest.param("head_major", False, marks=pytest.mark.slow),
        pytest.param("token_major", True, marks=pytest.mark.slow),
    ],
)
def test_attention_in_chunks_is_that_of_all_tokens(layout: PageLayout, views: bool) -> None:
    cache = cache_of(layout, 40, views=views)
    assert len(cache.num_blocks) == (1 if views else 2) and len(cache.groups) > 2
    mesh, config = (
        tensor_mesh(jax.devices()[:1]),
        ExecutorConfig("float32", 1, (8,), 1, LENGTH, cache, "xla"),
    )
    windows = tuple(group.window for group in cache.groups)
    shapes = Layout(8, 1, LENGTH // PAGE_SIZE, windows=windows, page_size=PAGE_SIZE)
    layers, pages = (
        make_layers(structure, SHAPED, config, mesh),
        allocate_caches(config, SHAPED, mesh),
    )
    run = jax.jit(
        lambda pages, vector: layers(
            [], pages, None, shapes.unpack(vector), jnp.zeros(8, jnp.int32), None
        )
    )
    rows, taken = RowTable(1, LENGTH // PAGE_SIZE, len(cache.groups)), [0] * len(cache.num_blocks)
    blocks: list[list[int]] = []
    for group in cache.groups:
        blocks.append([taken[group.pool] + index for index in range(-(-TOKENS // PAGE_SIZE))])
        taken[group.pool] += len(blocks[-1])
    assert all(number <= most for number, most in zip(taken, cache.num_blocks, strict=True))
    rows.update([Member("r", 0, 0, [1], is_sampling=False, new_blocks=tuple(blocks))])
    expected = jnp.concatenate([dense(layer).reshape(TOKENS, -1) for layer in range(6)], axis=1)
    for start in range(0, TOKENS, CHUNK):
        size = min(CHUNK, TOKENS - start)
        vector = np.zeros(shapes.size, np.int32)
        view = shapes.views(vector)
        view["positions"][:size] = np.arange(start, start + size)
        view["query_len"][0], view["context_len"][0] = size, start + size
        shapes.write_blocks(view, rows.blocks, np.zeros(1, np.int32), np.array([start], np.int32))
        pages, _, hidden = run(pages, jnp.asarray(vector))
        assert np.allclose(hidden[:size], expected[start : start + size], atol=1e-5)


@pytest.mark.slow
def test_a_view_is_no_copy() -> None:
    """A copy of the pages, or of those of one layer, would show in the temporary memory."""
    cache = cache_of("head_major", 4000, views=True)
    mesh, config = (
        tensor_mesh(jax.devices()[:1]),
        ExecutorConfig("float32", 1, (8,), 1, LENGTH, cache, "xla"),
    )
    windows = tuple(group.window for group in cache.groups)
    shapes = Layout(8, 1, LENGTH // PAGE_SIZE, windows=windows, page_size=PAGE_SIZE)
    layers, pages = (
        make_layers(structure, SHAPED, config, mesh),
        allocate_caches(config, SHAPED, mesh),
    )
    run = jax.jit(
        lambda pages, vector: layers(
            [], pages, None, shapes.unpack(vector), jnp.zeros(8, jnp.int32), None
        )[::2],
        donate_argnums=0,
    )
    alias, temp = memory_of(
        run.lower(pages, jax.ShapeDtypeStruct((shapes.size,), jnp.int32)).compile()
    )
    size = sum(x.nbytes for x in jax.tree.leaves(pages))
    assert alias >= size and temp < size / 8
