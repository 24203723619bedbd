"""Pages in the memory of the host."""

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

from orca_jax.exec.tiers.base import PageName, StoredPage


class MemoryTier:
    """Pages in the memory of this process.

    Args:
        most_bytes: bytes of all payloads together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._pages: OrderedDict[PageName, bytes] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, name: object) -> bool:
        return name in self._pages

    def write(self, page: StoredPage) -> None:
        """Keep a page, if it is not larger than the tier."""
        size = page.num_bytes
        if size > self._most_bytes:
            return
        with self._lock:
            self._forget(page.name)
            while self.num_bytes + size > self._most_bytes:
                self._forget(next(iter(self._pages)))
            self._pages[page.name] = b"".join(page.payload)
            self.num_bytes += size

    def read(self, name: PageName) -> bytes:
        """The payload of a page. Raises ValueError if it is gone."""
        payload = self._pages.get(name)
        if payload is None:
            raise ValueError("the page is gone")
        return payload

    def touch(self, names: Iterable[PageName]) -> None:
        """Make pages the most recently used ones."""
        with self._lock:
            for name in names:
                if name in self._pages:
                    self._pages.move_to_end(name)

    def clear(self) -> None:
        """Remove all pages."""
        with self._lock:
            self._pages.clear()
            self.num_bytes = 0

    def _forget(self, name: PageName) -> None:
        payload = self._pages.pop(name, None)
        if payload is not None:
            self.num_bytes -= len(payload)
