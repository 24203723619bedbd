"""The iterations of an engine for the pages that watch it. The engine sends none while nothing watches."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Self

from orca_jax.link.wire import Watch

MAX_WATCHERS = 16
MAX_UNREAD = 100  # groups of lines for each watcher, some ten seconds; older ones are dropped


class FeedFull(Exception):
    """There are `MAX_WATCHERS` already."""


class News(NamedTuple):
    """Lines of JSON for one watcher, and the number of lines dropped before them."""

    lines: bytes
    num_dropped: int


class Watcher:
    """One reader of a `Feed`, and a context manager; leaving it ends the watch."""

    def __init__(self, feed: "Feed") -> None:
        self._feed = feed
        self._unread: deque[bytes] = deque()
        self._num_dropped = 0
        self._has_ended = False
        self._news = asyncio.Event()

    async def receive(self, seconds: float) -> News | None:
        """Return the lines that have arrived, after `seconds` at most; None if no line will follow.

        After dropped lines the engine is asked for another `LiveStart`, since requests may have come and gone.
        """
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except TimeoutError:
            return News(b"", 0)
        if self._has_ended and not self._unread:
            return None
        news = News(b"".join(self._unread), self._num_dropped)
        self._unread.clear()
        self._num_dropped = 0
        if not self._has_ended:
            self._news.clear()
        if news.num_dropped:
            self._feed.resume()
        return news

    def add_lines(self, lines: bytes) -> None:
        """Add lines for `receive`, and drop the oldest ones if the reader is slow."""
        if len(self._unread) == MAX_UNREAD:
            self._num_dropped += self._unread.popleft().count(b"\n")
        self._unread.append(lines)
        self._news.set()

    def end(self) -> None:
        """Let `receive` return None after the lines so far."""
        self._has_ended = True
        self._news.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._feed.leave(self)


class Feed:
    """Passes the lines of `Iterations` to all watchers. All methods belong to one event loop.

    Args:
        send: sends a message to the engine; discards it if there is none.
    """

    def __init__(self, send: Callable[[Watch], None]) -> None:
        self._send = send
        self._watchers: set[Watcher] = set()
        self._is_closed = False

    def watch(self) -> Watcher:
        """Begin to watch.

        Raises:
            FeedFull: there are too many watchers.
        """
        if len(self._watchers) == MAX_WATCHERS:
            raise FeedFull
        watcher = Watcher(self)
        if self._is_closed:
            watcher.end()
        else:
            self._watchers.add(watcher)
            self._send(Watch(True))
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """End a watch. The last one to leave stops the messages of the engine."""
        if watcher in self._watchers:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._send(Watch(False))

    def resume(self) -> None:
        """Ask the engine for its state: it is a new one, or lines were dropped."""
        if self._watchers:
            self._send(Watch(True))

    def take_lines(self, lines: bytes) -> None:
        """Add lines of the engine for all watchers."""
        for watcher in self._watchers:
            watcher.add_lines(lines)

    def close(self) -> None:
        """End all watches, since the server stops."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.end()
        self._watchers.clear()
