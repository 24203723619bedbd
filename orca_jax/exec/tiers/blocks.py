"""Blocks of the KV cache as bytes, and back: the numbers that tiers outside of the devices keep.

The payload of a block has, for each pipeline stage and each array of its pages or states, those of the group's layers
in their order, with all heads. So it does not depend on the devices that share a layer.
"""

from collections.abc import Buffer, Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from orca_jax.exec.stage import Stage
from orca_jax.exec.states import PoolArrays
from orca_jax.exec.tiers.base import Payload
from orca_jax.values.cache_spec import pages_in_one

STATES = -1
"""The kind of blocks of states; that of pages is their pool."""

type BlockArrays = list[list[NDArray[np.generic]]]
"""The pages of one block, by stage and by array of a pool."""


class BlockAt(NamedTuple):
    """A block on the devices."""

    group: int  # of layers
    block: int  # of the group's pool


class _PagePart(NamedTuple):
    """The pages of a group in one array of a stage.

    Attributes:
        num_pages: pages of the payload in a block.
        shape: the shape of all pages of a block.
        dtype: the type of the numbers.
    """

    num_pages: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def num_bytes(self) -> int:
        """Bytes in the payload of a block."""
        return self.num_pages * int(np.prod(self.shape[1:])) * self.dtype.itemsize


class BlockMover:
    """Reads and writes blocks of all stages of a model, in the order of the launches.

    Blocks of states have the group after the last one of pages.

    Args:
        stages: all stages of the model, on devices of this process.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        groups = stages[0].shapes.groups
        self._kinds = [group.pool for group in groups]
        if any(_pools_of(stage, STATES) for stage in stages):
            self._kinds.append(STATES)
        self._parts = [_parts_of(stages, index) for index, _ in enumerate(self._kinds)]

    def block_bytes(self, group: int) -> int:
        """Bytes of the payload of a block."""
        return sum(part.num_bytes for part in chain.from_iterable(self._parts[group]))

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest payload."""
        return max(self.block_bytes(group) for group, _ in enumerate(self._parts))

    def read(self, blocks: Sequence[BlockAt]) -> Callable[[], Iterator[Payload | None]]:
        """Start to read blocks, after the launches submitted so far.

        Returns:
            A function that waits for the payloads, in any thread; None for a block with a number that is not finite.
        """
        started = [(group, self._start(group, block)) for group, block in blocks]

        def payloads() -> Iterator[Payload | None]:
            for group, of_stages in started:
                yield self._payload(group, of_stages)

        return payloads

    def _start(self, group: int, block: int) -> list[list[PoolArrays]]:
        """Start to read a block of all stages."""
        kind = self._kinds[group]
        return [_read(stage, kind, block) for stage in self._stages]

    def convert(self, group: int, payload: bytes) -> BlockArrays:
        """The pages of a block, from its payload. Raises ValueError for a payload of another size."""
        if len(payload) != self.block_bytes(group):
            raise ValueError(
                f"the page has {len(payload)} bytes of numbers, not {self.block_bytes(group)}"
            )
        done = 0
        found: BlockArrays = []
        for parts in self._parts[group]:
            arrays: list[NDArray[np.generic]] = []
            for part in parts:
                pages = np.zeros(part.shape, part.dtype)
                own = np.frombuffer(payload, np.uint8, part.num_bytes, done)
                shape = (part.num_pages, *part.shape[1:])
                pages[: part.num_pages] = own.view(part.dtype).reshape(shape)
                arrays.append(pages)
                done += part.num_bytes
            found.append(arrays)
        return found

    def write(self, blocks: Sequence[tuple[BlockAt, BlockArrays]]) -> None:
        """Start to write blocks, after the launches submitted so far."""
        for (group, block), arrays in blocks:
            for stage, leaves in zip(self._stages, arrays, strict=True):
                _write(stage, self._kinds[group], block, leaves)

    def _payload(self, group: int, of_stages: Sequence[Sequence[PoolArrays]]) -> Payload | None:
        """The payload of a block, without a copy where the host is the device; None if a number is not finite."""
        pieces: list[Buffer] = []
        for parts, pools in zip(self._parts[group], of_stages, strict=True):
            for part, array in zip(parts, jax.tree.leaves(pools), strict=True):
                pages = np.ascontiguousarray(np.asarray(array)[: part.num_pages])
                if not _is_finite(pages):
                    return None
                pieces.append(pages.reshape(-1).view(np.uint8).data)
        return pieces


def _parts_of(stages: Sequence[Stage], group: int) -> list[list[_PagePart]]:
    """The parts of a group's payload in all stages."""
    return [_parts(stage, group) for stage in stages]


def _parts(stage: Stage, group: int) -> list[_PagePart]:
    """The parts of a group's payload in a stage."""
    groups = stage.shapes.groups
    is_of_pages = group < len(groups)
    kind = groups[group].pool if is_of_pages else STATES
    found: list[_PagePart] = []
    for each in chain.from_iterable(_leaves_of(stage, kind)):
        used = each.shape[0]
        if is_of_pages and stage.shapes.only_counts_tokens:
            used = 0
        # several pages of a layer may share a stored page: then all of them are kept
        elif is_of_pages and pages_in_one(groups[group], groups) == 1:
            used = len(groups[group].layers)
        found.append(_PagePart(used, each.shape, np.dtype(each.dtype)))
    return found


def _pools_of(stage: Stage, kind: int) -> Sequence[int]:
    """The pools of a stage with the blocks of a kind: one of pages, or all of states."""
    if kind != STATES:
        return (kind,)
    shapes = stage.shapes
    return range(1 + max(group.pool for group in shapes.groups), shapes.num_pools)


def _leaves_of(stage: Stage, kind: int) -> list[list[jax.ShapeDtypeStruct]]:
    """The shapes of the arrays of each of these pools."""
    return [jax.tree.leaves(stage.shapes.block_shape(pool)) for pool in _pools_of(stage, kind)]


def _read(stage: Stage, kind: int, block: int) -> list[PoolArrays]:
    return [stage.read_block(pool, block) for pool in _pools_of(stage, kind)]


def _write(stage: Stage, kind: int, block: int, leaves: list[NDArray[np.generic]]) -> None:
    for pool in _pools_of(stage, kind):
        shapes, form = jax.tree.flatten(stage.shapes.block_shape(pool))
        own = leaves[: len(shapes)]
        leaves = leaves[len(shapes) :]
        stage.write_block(pool, block, jax.tree.unflatten(form, own))


def _is_finite(pages: NDArray[np.generic]) -> bool:
    """True if no number is NaN or infinite. Integers always are finite."""
    if pages.dtype == np.int8 or not pages.size:
        return True
    if pages.dtype in (np.float32, np.float16):
        # quicker than a look at each number; the sum of finite ones may overflow, and its page is then not kept
        return bool(np.isfinite(np.add.reduce(pages, axis=None, dtype=np.float32)))
    return int(_magnitudes(pages).max()) < _NOT_FINITE[pages.dtype.itemsize]


_NOT_FINITE = {2: 0x7F80, 1: 0x7F}
"""The bits of the smallest number that is not finite, without sign: of bfloat16, and of e4m3 as bytes."""


def _magnitudes(pages: NDArray[np.generic]) -> NDArray[np.unsignedinteger[Any]]:
    if pages.dtype.itemsize == 2:
        return pages.view(np.uint16) & np.uint16(0x7FFF)
    return pages.view(np.uint8) & np.uint8(0x7F)
