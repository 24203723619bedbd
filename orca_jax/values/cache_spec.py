"""Blocks: the things that a running request owns in the KV cache, by group of layers.

A layer keeps keys and values in pages of `page_size` tokens. Layers that need the same tokens again form a *group*: all
tokens, or those within a window. A *block* is one page in each layer of a group, and a row of the batch has a list of
blocks for each group. Blocks of all groups have the same bytes and share one space of ids, a *pool*, so memory is
divided between groups while serving, not at start. A block may have a few pages more than its group has layers; these
are padding.

A layer that is recurrent has no pages. It keeps a state of a fixed size: the sum of all tokens so far, in some form. A
*state block* is one state in each of these layers. A row has one, in its own pool.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

NO_BLOCK = -1
"""An entry of a row's blocks that was never allocated; also no state block."""

MOST_PADDING = 0.15
"""Largest ratio of padding to used pages in the blocks of all groups, where it can be had."""


def ceil_div(number: int, size: int) -> int:
    """Return the number of parts of at most `size` that hold `number`."""
    return -(-number // size)


class PageShape(NamedTuple):
    """The sizes of one page of one layer, on all devices together."""

    num_kv_heads: int
    head_dim: int
    has_values: bool = True  # False: one array, whose keys are the values too, such as latents

    @property
    def size(self) -> int:
        """Numbers of one token in each array."""
        return self.num_kv_heads * self.head_dim

    @property
    def token_size(self) -> int:
        """Numbers of one token in all arrays."""
        return self.size * (1 + self.has_values)


class LayerCache(NamedTuple):
    """What one layer keeps of a request."""

    shape: PageShape
    window: int | None = None  # tokens that each token sees, itself included; None: all before it


class LayerGroup(NamedTuple):
    """Layers whose pages are allocated together, as blocks.

    Attributes:
        layers: indices in the model, ascending. The i-th one has page i of each block.
        pages_per_block: number of pages, at least that of layers; the other pages are padding.
        shape: the shape of the pages.
        window: tokens that each token sees, itself included; None: all before it.
        pool: index of the pool that the blocks come from.
    """

    layers: tuple[int, ...]
    pages_per_block: int
    shape: PageShape
    window: int | None = None
    pool: int = 0

    def first_needed(self, start: int) -> int:
        """The first position whose keys and values a token at position `start`, or any later one, reads."""
        if self.window is None:
            return 0
        return max(0, start - self.window + 1)

    def blocks_in_decode(self, num_tokens: int, page_size: int) -> int:
        """Blocks of a request with `num_tokens`, the newest of which was the only one in its plan."""
        return ceil_div(num_tokens, page_size) - self.first_needed(num_tokens - 1) // page_size

    def most_blocks(self, num_tokens: int, longest: int, page_size: int) -> int:
        """Most blocks that a request of `num_tokens` holds at once, if its members have at most `longest` tokens.

        A member of n tokens reads the `window` - 1 tokens before them, in pages that may be cut at both ends.
        """
        blocks = ceil_div(num_tokens, page_size)
        if self.window is None:
            return blocks
        return min(blocks, ceil_div(self.window + longest - 2, page_size) + 1)


ONE_GROUP = (LayerGroup((0,), 1, PageShape(1, 1)),)
"""One layer that keeps all tokens, as a model of tests and simulations has."""


def attended_pairs(start: int, size: int, window: int | None) -> int:
    """Pairs of a token and an attended one in a layer, for `size` tokens from position `start` on."""
    growing = size if window is None else min(size, max(0, window - start))
    pairs = growing * start + growing * (growing + 1) // 2
    return pairs + (size - growing) * (window or 0)


def one_group(layers: Sequence[LayerCache | None]) -> tuple[LayerGroup, ...]:
    """All layers with pages, of one shape, in one group that keeps all tokens; None stands for a layer without pages.

    Attention masks the tokens outside of windows.
    """
    (shape,) = {layer.shape for layer in layers if layer is not None}
    paged = tuple(index for index, layer in enumerate(layers) if layer is not None)
    return (LayerGroup(paged, len(paged), shape),)


def of_stage(groups: Sequence[LayerGroup], start: int, stop: int) -> tuple[LayerGroup, ...]:
    """The groups of a model as a pipeline stage with its layers `start` to `stop` has them, counted from `start`.

    A group may have no layers in the stage. Blocks of a pool have as many pages as its fullest group needs there.
    """
    parts: list[LayerGroup] = []
    pages = {group.pool: 1 for group in groups}  # of the largest shape, in a block
    for group in groups:
        own = tuple(layer - start for layer in group.layers if start <= layer < stop)
        pages[group.pool] = max(pages[group.pool], ceil_div(len(own), pages_in_one(group, groups)))
        parts.append(group._replace(layers=own))
    return tuple(
        part._replace(pages_per_block=pages[part.pool] * pages_in_one(part, groups))
        for part in parts
    )


def pool_shape(groups: Sequence[LayerGroup], pool: int) -> PageShape:
    """The shape in which the pages of a pool are stored: the largest one."""
    return max((group.shape for group in groups if group.pool == pool), key=_by_size)


def sums_by_pool(groups: Sequence[LayerGroup], numbers: Iterable[int]) -> tuple[int, ...]:
    """The sums of the groups' numbers in each pool."""
    sums = [0] * (max(group.pool for group in groups) + 1)
    for group, number in zip(groups, numbers, strict=True):
        sums[group.pool] += number
    return tuple(sums)


def pages_in_one(group: LayerGroup, groups: Sequence[LayerGroup]) -> int:
    """The pages of a group that have the bytes of one stored page."""
    return pool_shape(groups, group.pool).size // group.shape.size


def _by_size(shape: PageShape) -> tuple[int, PageShape]:
    return shape.token_size, shape


def _without_windows(groups: Iterable[LayerGroup]) -> list[LayerGroup]:
    return [group for group in groups if group.window is None]


def form_groups(
    layers: Sequence[LayerCache | None], max_model_len: int, *, views: bool = True
) -> tuple[LayerGroup, ...]:
    """Form the groups of a model: groups with all tokens first, then those with windows.

    Layers of the same kind are dealt to its groups in turns, so that each part of a pipeline has its share of every
    group. There are as few groups as `MOST_PADDING` allows. Layers that keep all tokens have no padding if the number
    of groups at most doubles by it, since their padding grows with the context. A window of `max_model_len` tokens or
    more is none. Layers of another shape have blocks of the same bytes where these hold whole pages, and else a pool of
    their own. Without `views` each shape has its own pool.

    Args:
        layers: the layers of the whole model, at least one of them with pages; None for those without.
        max_model_len: most tokens of a request.
        views: arrays can be viewed in another shape without a copy.
    """
    members: dict[LayerCache, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer is None:
            continue
        if layer.window is not None and layer.window >= max_model_len:
            layer = layer._replace(window=None)
        members.setdefault(layer, []).append(index)
    found = [
        _groups(members, width, views) for width in range(max(map(len, members.values())), 0, -1)
    ]
    allowed = [groups for groups in found if _padding(groups) <= MOST_PADDING] or found[-1:]
    exact = [groups for groups in allowed if not _padding(_without_windows(groups))]
    if exact and len(exact[0]) <= 2 * len(allowed[0]):
        return exact[0]
    return allowed[0]


def _groups(
    members: Mapping[LayerCache, Sequence[int]], width: int, views: bool
) -> tuple[LayerGroup, ...]:
    """The groups with `width` pages of the largest shape in a block."""
    widest = max((kind.shape for kind in members), key=_by_size)
    largest = widest.size

    def is_view(shape: PageShape) -> bool:
        return views and shape.has_values == widest.has_values and largest % shape.size == 0

    others: dict[PageShape, int] = {}  # pools of the shapes that share none
    groups: list[LayerGroup] = []
    for kind in sorted(
        members, key=lambda kind: (kind.window is not None, kind.window or 0, kind.shape)
    ):
        is_shared = kind.shape == widest or is_view(kind.shape)
        pool = 0 if is_shared else others.setdefault(kind.shape, len(others) + 1)
        pages = width * (largest // kind.shape.size) if is_shared else width
        count = ceil_div(len(members[kind]), pages)
        groups += [
            LayerGroup(tuple(members[kind][turn::count]), pages, kind.shape, kind.window, pool)
            for turn in range(count)
        ]
    return tuple(groups)


def _padding(groups: Sequence[LayerGroup]) -> float:
    """The ratio of padding to used pages, by their bytes."""
    used = sum(len(group.layers) * group.shape.token_size for group in groups)
    if not used:
        return 0.0
    return sum(group.pages_per_block * group.shape.token_size for group in groups) / used - 1
