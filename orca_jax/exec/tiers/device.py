"""Pages between the blocks of an executor and a store outside of its devices."""

from collections.abc import Callable, Sequence

from orca_jax.exec.stage import Stage
from orca_jax.exec.tiers.base import PageName, Tier
from orca_jax.exec.tiers.blocks import BlockArrays, BlockAt, BlockMover
from orca_jax.exec.tiers.store import PageFetch, PageStore


class DeviceTier:
    """The tiers of an engine, as its decisions see them (`sched/prefixes/outer.py`).

    Args:
        stages: all stages of the model, on devices of this process.
        tiers: where pages are kept, the quickest first.
    """

    def __init__(self, stages: Sequence[Stage], tiers: Sequence[Tier]) -> None:
        self._mover = BlockMover(stages)
        self.store = PageStore(tiers, self._mover.most_bytes, self._convert)

    def __contains__(self, name: object) -> bool:
        return name in self.store

    @property
    def room(self) -> int:
        """The number of pages that may be saved now."""
        return self.store.room

    @property
    def num_saved(self) -> int:
        """Pages saved since the start."""
        return self.store.num_saved

    @property
    def num_failed(self) -> int:
        """Pages that could not be saved or read."""
        return self.store.num_failed

    def call_when_saved(self, function: Callable[[], None]) -> None:
        """Let a thread call a function whenever there is room for more pages."""
        self.store.when_saved = function

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until all pages are saved, but not longer; False if some are left."""
        return self.store.wait_for_room(seconds)

    def save(self, pages: Sequence[tuple[PageName, int, int]]) -> None:
        """Save pages with a name, a depth and a block, as they are after the iterations submitted so far."""
        blocks = [BlockAt(name[0], block) for name, _, block in pages]
        self.store.save([(name, depth) for name, depth, _ in pages], self._mover.read(blocks))

    def fetch(self, names: Sequence[PageName]) -> PageFetch[BlockArrays]:
        """Begin to read pages."""
        return self.store.fetch(names)

    def load(self, pages: Sequence[tuple[PageName, int, BlockArrays]]) -> None:
        """Write pages with a name, a block and numbers, before the next iteration."""
        self._mover.write([(BlockAt(name[0], block), arrays) for name, block, arrays in pages])

    def seconds(self, num_pages: int) -> float:
        """The expected time of reading so many pages."""
        return self.store.seconds(num_pages)

    def wait(self, reading: PageFetch[BlockArrays], seconds: float) -> None:
        """Wait until a reading is done, but not longer."""
        self.store.wait(reading, seconds)

    def touch(self, names: Sequence[PageName]) -> None:
        """Make pages the most recently used ones, the last one most of all."""
        self.store.touch(names)

    def close(self) -> None:
        """Save what is queued, and end the threads."""
        self.store.close()

    def _convert(self, name: PageName, payload: bytes) -> BlockArrays:
        return self._mover.convert(name[0], payload)
