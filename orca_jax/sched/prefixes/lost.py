"""Evicted pages of the prefix cache: when, and for which request. Kept only if calls ask for the reason."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

MOST_PAGES = 65_536  # some 10 MB


class LostPages:
    """The last evicted pages.

    Args:
        clock: seconds, monotonic.

    Attributes:
        cause: id of the request in need of room.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.cause: str | None = None
        self._clock = clock
        self._lost: OrderedDict[bytes, tuple[float, str | None]] = OrderedDict()

    def add_page(self, digest: bytes) -> None:
        """Take note of an evicted page."""
        self._lost[digest] = self._clock(), self.cause
        self._lost.move_to_end(digest)
        if len(self._lost) > MOST_PAGES:
            self._lost.popitem(last=False)

    def first(self, digests: Sequence[bytes]) -> tuple[float, str | None] | None:
        """The seconds since the eviction of the first known page of these, and the request in need of room."""
        for digest in digests:
            if digest in self._lost:
                moment, cause = self._lost[digest]
                return self._clock() - moment, cause
        return None
