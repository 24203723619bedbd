"""Tiers behind threads: pages are saved and read while the device computes."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Condition

from orca_jax.exec.tiers.base import PageName, Payload, StoredPage, Tier

logger = logging.getLogger(__name__)

QUEUED_BYTES = 256 * 2**20  # most bytes that wait for being saved
RATE = 500e6  # bytes a second, before a read was measured
_READERS = 2  # threads
_MEMORY = 0.3  # weight of the newest measurement
_CLOSING = 10.0  # seconds for the pages that are still to be saved

type Convert[P] = Callable[[PageName, bytes], P]
"""Makes the form in which a page is put on the devices. Raises ValueError for a payload of another size."""


class PageFetch[P]:
    """Pages that are being read.

    Attributes:
        pages: the pages found so far, in the form of `convert`.
    """

    def __init__(self, number: int) -> None:
        self.pages: dict[PageName, P] = {}
        self.num_left = number

    @property
    def is_done(self) -> bool:
        """True if no page is to come."""
        return self.num_left == 0


class PageStore[P]:
    """Saves and reads the pages of some tiers in threads.

    Args:
        tiers: the quickest first; each gets all pages.
        page_bytes: the most bytes of a page.
        convert: called by the threads that read.

    Attributes:
        num_saved, num_read: pages since the start.
        num_failed: pages that could not be saved or read.
        when_saved: called by a thread when there is room for more pages.
    """

    def __init__(self, tiers: Sequence[Tier], page_bytes: int, convert: Convert[P]) -> None:
        self._tiers = tiers
        self._page_bytes = page_bytes
        self._convert = convert
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="save-pages")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="read-pages")
        self._changed = Condition()
        self._num_queued = 0
        self._seconds_per_byte = 1 / RATE
        self._has_warned = False
        self._is_closed = False
        self.num_saved = 0
        self.num_read = 0
        self.num_failed = 0
        self.when_saved: Callable[[], None] = lambda: None

    def __contains__(self, name: object) -> bool:
        return any([name in tier for tier in self._tiers])

    @property
    def room(self) -> int:
        """The number of pages that may be saved now; one of any size if none is queued."""
        return max(0, max(1, QUEUED_BYTES // self._page_bytes) - self._num_queued)

    def save(
        self,
        pages: Sequence[tuple[PageName, int]],
        payloads: Callable[[], Iterable[Payload | None]],
    ) -> None:
        """Save pages in the background.

        Args:
            pages: the name and the depth of each.
            payloads: waits for their numbers; None for a page that must not be kept.
        """
        with self._changed:
            self._num_queued += len(pages)
        self._writer.submit(self._save, pages, payloads)

    def fetch(self, names: Sequence[PageName]) -> PageFetch[P]:
        """Begin to read pages. Those that cannot be read are missing in the end."""
        reading = PageFetch[P](len(names))
        begin = time.perf_counter()
        for name in names:
            self._readers.submit(partial(self._read, name, reading, begin, len(names)))
        return reading

    def wait(self, reading: PageFetch[P], seconds: float) -> None:
        """Wait until a reading is done, but not longer."""
        with self._changed:
            self._changed.wait_for(lambda: reading.is_done, seconds)

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until all pages are saved, but not longer; False if some are left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_queued, seconds)

    def seconds(self, num_pages: int) -> float:
        """The expected time of reading so many pages, from those read before."""
        return num_pages * self._page_bytes * self._seconds_per_byte

    def touch(self, names: Sequence[PageName]) -> None:
        """Make pages the most recently used ones, the last one most of all."""
        for tier in self._tiers:
            self._writer.submit(tier.touch, names)

    def close(self) -> None:
        """Save what is queued, as far as a few seconds suffice, and end the threads."""
        self._is_closed = True
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.wait_for_room(_CLOSING)
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _save(
        self,
        pages: Sequence[tuple[PageName, int]],
        payloads: Callable[[], Iterable[Payload | None]],
    ) -> None:
        """Save pages; a failure costs the pages alone."""
        try:
            for (name, depth), payload in zip(pages, payloads(), strict=True):
                if payload is not None:
                    self._write(StoredPage(name, depth, payload))
        except Exception:
            # the devices have gone, or a defect: the engine says so itself
            logger.exception("pages of the KV cache were not saved")
        finally:
            with self._changed:
                self._num_queued -= len(pages)
                self._changed.notify_all()
            if not self._is_closed:
                self.when_saved()

    def _write(self, page: StoredPage) -> None:
        for tier in self._tiers:
            try:
                tier.write(page)
                self.num_saved += 1
            except OSError as error:
                self.num_failed += 1
                self._warn("saved", error)

    def _read(self, name: PageName, reading: PageFetch[P], begin: float, number: int) -> None:
        """Read one page from the first tier that has it."""
        page = None
        try:
            page = self._found(name)
        finally:
            with self._changed:
                if page is not None:
                    reading.pages[name] = page
                    self.num_read += 1
                reading.num_left -= 1
                if reading.is_done:
                    measured = (time.perf_counter() - begin) / (number * self._page_bytes)
                    self._seconds_per_byte += _MEMORY * (measured - self._seconds_per_byte)
                    self._changed.notify_all()

    def _found(self, name: PageName) -> P | None:
        for tier in self._tiers:
            if name not in tier:
                continue
            try:
                return self._convert(name, tier.read(name))
            except (OSError, ValueError) as error:
                self.num_failed += 1
                self._warn("read", error)
        return None

    def _warn(self, verb: str, error: Exception) -> None:
        """Say the first failure aloud; the others are counted."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        self._has_warned = True
        logger.log(level, "a page of the KV cache could not be %s: %s", verb, error)
