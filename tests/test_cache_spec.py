"""Groups of layers: tables computed by hand, and what holds for every model."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_jax.values.cache_spec import (
    MOST_PADDING,
    LayerCache,
    PageShape,
    form_groups,
    of_stage,
    pool_shape,
)

SHAPE = PageShape(2, 8)
WIDE = PageShape(4, 8)  # twice the bytes
ODD = PageShape(3, 8)  # the wide one is no multiple of it


def kinds(pattern: str, num_layers: int, window: int = 1024) -> list[LayerCache]:
    """Layers of a repeated pattern of F (all tokens) and W (a window)."""
    letters = [pattern[index % len(pattern)] for index in range(num_layers)]
    return [LayerCache(SHAPE, window if letter == "W" else None) for letter in letters]


@pytest.mark.parametrize(
    ("layers", "sizes", "pages"),
    [
        (kinds("F", 5), [5], 5),
        (kinds("W", 5), [5], 5),
        (kinds("WWWWWF", 62), [10, 9, 9, 9, 9, 8, 8], 10),  # Gemma 3 27B: 8 of 70 pages are padding
        (kinds("WF", 26), [13, 13], 13),  # Gemma 2 2B
        (kinds("WWWF", 4), [1, 1, 1, 1], 1),
    ],
)
def test_groups_of_one_shape(layers: list[LayerCache], sizes: list[int], pages: int) -> None:
    groups = form_groups(layers, 131072)
    assert [len(group.layers) for group in groups] == sizes
    assert {group.pages_per_block for group in groups} == {pages}
    assert [group.window for group in groups] == sorted(
        (g.window for g in groups), key=lambda w: w or 0
    )


def test_windows_of_one_kind_are_dealt_in_turns() -> None:
    full, *windowed = form_groups(kinds("WWWWWF", 12), 131072)
    assert full.layers == (5, 11)
    assert [group.layers for group in windowed] == [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10)]


def test_a_window_as_long_as_the_context_is_none() -> None:
    (group,) = form_groups(kinds("WF", 4), 1024)
    assert group.window is None and group.layers == (0, 1, 2, 3)


def test_shapes_share_a_pool_where_a_block_holds_whole_pages() -> None:
    layers = [LayerCache(WIDE, 64) if index % 6 < 5 else LayerCache(SHAPE) for index in range(12)]
    full, *windowed = form_groups(layers, 4096)
    assert (
        full.layers == (5, 11)
        and full.pages_per_block == 2
        and {g.pages_per_block for g in windowed} == {1}
    )
    assert {group.pool for group in (full, *windowed)} == {0}
    other = form_groups([LayerCache(WIDE, 64), LayerCache(ODD)], 4096)
    assert [group.pool for group in other] == [1, 0]


def test_pages_without_values_share_no_pool_with_others() -> None:
    """Their one array of 32 numbers has the bytes of keys and values of 16, and is no view of them."""
    latent = PageShape(4, 8, has_values=False)
    assert latent.token_size == SHAPE.token_size == 32 and latent != WIDE
    layers = [LayerCache(latent), LayerCache(SHAPE, 64), LayerCache(latent)]
    groups = form_groups(layers, 4096)
    assert len({group.pool for group in groups}) == 2
    assert Counter(layer for group in groups for layer in group.layers) == Counter(range(3))
    assert len({group.pool for group in form_groups(layers[::2], 4096)}) == 1


def test_the_first_needed_position() -> None:
    (full,), (windowed,) = form_groups(kinds("F", 1), 99), form_groups(kinds("W", 1, 4), 99)
    assert [full.first_needed(start) for start in (0, 50)] == [0, 0]
    assert [windowed.first_needed(start) for start in (0, 3, 4, 50)] == [0, 0, 1, 47]


@given(
    st.lists(
        st.tuples(st.sampled_from([SHAPE, WIDE, ODD]), st.sampled_from([None, 8, 64])),
        min_size=1,
        max_size=80,
    )
)
def test_each_layer_has_one_group_of_its_kind(drawn: list[tuple[PageShape, int | None]]) -> None:
    layers = [LayerCache(*each) for each in drawn]
    groups = form_groups(layers, 4096)
    assert Counter(layer for group in groups for layer in group.layers) == Counter(
        range(len(layers))
    )
    for group in groups:
        assert {layers[layer] for layer in group.layers} == {LayerCache(group.shape, group.window)}
        assert (
            list(group.layers) == sorted(group.layers)
            and len(group.layers) <= group.pages_per_block
        )
    by_pool = {(group.pool, group.pages_per_block * group.shape.size) for group in groups}
    assert len(by_pool) == len({group.pool for group in groups}), "blocks of a pool differ in bytes"
    used = sum(len(group.layers) * group.shape.size for group in groups)
    padding = sum(group.pages_per_block * group.shape.size for group in groups) - used
    assert padding <= MOST_PADDING * used or any(group.pages_per_block == 1 for group in groups)


def test_shapes_that_cannot_be_viewed_have_pools_of_their_own() -> None:
    layers = [LayerCache(WIDE, 64), LayerCache(SHAPE), LayerCache(WIDE)]
    assert {group.pool for group in form_groups(layers, 4096)} == {0}
    pools = {group.shape: group.pool for group in form_groups(layers, 4096, views=False)}
    assert pools == {WIDE: 0, SHAPE: 1}
    assert pool_shape(form_groups(layers, 4096), 0) == WIDE


def test_a_stage_has_its_layers_of_each_group() -> None:
    """Stored pages of a block are as many as the fullest group needs: two narrow pages have the bytes of a wide one."""
    layers = [LayerCache(WIDE, 64) if index % 3 < 2 else LayerCache(SHAPE) for index in range(12)]
    groups = form_groups(layers, 4096)
    first, last = of_stage(groups, 0, 7), of_stage(groups, 7, 12)
    assert sorted(layer for group in first for layer in group.layers) == list(range(7))
    assert sorted(layer for group in last for layer in group.layers) == list(range(5))
    for stage in (first, last):
        assert [group.window for group in stage] == [group.window for group in groups]
        stored = {group.pages_per_block * group.shape.size for group in stage}
        assert len(stored) == 1 and all(
            len(group.layers) <= group.pages_per_block for group in stage
        )
