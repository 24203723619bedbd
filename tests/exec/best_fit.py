"""A model of XLA's allocator of a GPU's memory ("BFC"): best fit in one region, with splits and joins of neighbours."""

from dataclasses import dataclass

GRAIN = 256  # bytes; every size is a multiple
MOST_WASTE = 128 << 20  # a chunk that is larger by this, or twice as large, is split


class OutOfMemory(Exception):
    """No free chunk is large enough."""


@dataclass(eq=False)
class Chunk:
    """Consecutive bytes."""

    size: int
    is_free: bool = True


class BestFit:
    """The memory of one device.

    Args:
        size: in bytes.
    """

    def __init__(self, size: int) -> None:
        self._chunks = [Chunk(size // GRAIN * GRAIN)]

    @property
    def free_bytes(self) -> int:
        """Bytes in all free chunks."""
        return sum(chunk.size for chunk in self._chunks if chunk.is_free)

    @property
    def largest(self) -> int:
        """Bytes of the largest free chunk."""
        return max((chunk.size for chunk in self._chunks if chunk.is_free), default=0)

    def allocate(self, size: int) -> Chunk:
        """Take the smallest chunk that is large enough, and split it if much is left. Raises OutOfMemory."""
        size = max(1, -(-size // GRAIN)) * GRAIN
        fitting = [chunk for chunk in self._chunks if chunk.is_free and chunk.size >= size]
        if not fitting:
            raise OutOfMemory(
                f"{size / 1e9:.2f} GB; the largest of {self.free_bytes / 1e9:.2f} has {self.largest / 1e9:.2f}"
            )
        chunk = min(fitting, key=lambda chunk: chunk.size)
        if chunk.size >= 2 * size or chunk.size - size >= MOST_WASTE:
            self._chunks.insert(self._chunks.index(chunk) + 1, Chunk(chunk.size - size))
            chunk.size = size
        chunk.is_free = False
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Give a chunk back, and join it with free neighbours."""
        chunk.is_free = True
        at = self._chunks.index(chunk)
        for first in (at, at - 1):
            if 0 <= first < len(self._chunks) - 1 and all(
                each.is_free for each in self._chunks[first : first + 2]
            ):
                self._chunks[first].size += self._chunks.pop(first + 1).size
