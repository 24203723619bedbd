"""Pages outside of the devices, and the protocol of the tiers that keep them."""

from collections.abc import Buffer, Iterable, Sequence
from typing import NamedTuple, Protocol

type PageName = tuple[int, bytes]
"""The group of layers, and the digest of the content of a page and of all content before it."""


type Payload = Sequence[Buffer]
"""The numbers of a block, in pieces."""


class StoredPage(NamedTuple):
    """One block of the KV cache outside of the devices.

    Attributes:
        name: its name in the prefix cache.
        depth: the number of pages before it.
        payload: the numbers of all its layers, in pieces.
    """

    name: PageName
    depth: int
    payload: Payload

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return sum([memoryview(piece).nbytes for piece in self.payload])


class Tier(Protocol):
    """Pages by name, of a bounded size. The least recently used ones make room."""

    def __contains__(self, name: object) -> bool:
        """True if `read` is likely to find the page; any thread may ask."""
        ...

    def write(self, page: StoredPage) -> None:
        """Keep a page. Raises OSError."""
        ...

    def read(self, name: PageName) -> bytes:
        """The payload of a page. Raises OSError or ValueError, and the page is gone."""
        ...

    def touch(self, names: Iterable[PageName]) -> None:
        """Make pages the most recently used ones, the last one most of all."""
        ...

    def clear(self) -> None:
        """Remove all pages."""
        ...
