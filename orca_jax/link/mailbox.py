"""What the engine sends for the requests of one HTTP call."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from orca_jax.link.admission import Deadlines
from orca_jax.link.errors import TimedOut
from orca_jax.link.wire import Rejected
from orca_jax.request import RequestUpdate

MAX_UNREAD = 2048  # updates for each request that may lie here until the call is ended, since nobody reads


class Mailbox:
    """The requests of one call, numbered in the call's order.

    An async context manager: leaving it aborts the requests that have not ended. So does the first error.

    Args:
        request_ids: of the call's requests.
        abort: ends one of them in the engine, if it is open there.
        leave: called once, when the call is over.
    """

    def __init__(
        self, request_ids: Sequence[str], abort: Callable[[str], None], leave: Callable[["Mailbox"], None]
    ) -> None:
        self._ids = tuple(request_ids)
        self._abort = abort
        self._leave = leave
        self._items: list[tuple[int, RequestUpdate | Rejected]] = []
        self._max_items = MAX_UNREAD * len(self._ids)
        self._silent = set(range(len(self._ids)))  # requests without an update so far
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []

    def limit(self, deadlines: Deadlines) -> None:
        """Start the clocks."""
        loop = asyncio.get_running_loop()
        if deadlines.queue is not None:
            self._timers.append(loop.call_later(deadlines.queue, self._end_if_silent))
        if deadlines.total is not None:
            self._timers.append(loop.call_later(deadlines.total, self._end_late))

    async def receive(self) -> list[tuple[int, RequestUpdate | Rejected]]:
        """Wait for news and take all there is: what came together is handled together.

        Raises:
            Exception: whatever `fail` was given, after the updates before it.
        """
        await self._news.wait()
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items, []
        if self._error is None:
            self._news.clear()
        return items

    def deliver(self, index: int, item: RequestUpdate | Rejected) -> None:
        """Called by the client, in the engine's order."""
        if self._silent:
            self._silent.discard(index)
        self._items.append((index, item))
        self._news.set()
        if len(self._items) > self._max_items:
            self._items.clear()  # what is left of a text with a hole in it is worth nothing
            self.fail(TimedOut("the client takes the answer too slowly", "client_too_slow"))

    def fail(self, error: Exception) -> None:
        """End the call: the engine died, the server stops, time is up, or the caller hung up. The first error counts.

        The engine hears of it at once: whoever reads this mailbox may be stuck in a write.
        """
        if self._error is None:
            self._error = error
            self._news.set()
            self._end()

    def abort(self, index: int) -> None:
        """End one request; nothing more comes for it."""
        self._silent.discard(index)
        self._abort(self._ids[index])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._leave(self)

    def _end(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for request_id in self._ids:
            self._abort(request_id)

    def _end_if_silent(self) -> None:
        if self._silent:
            message = "the request waited longer for the engine than it was allowed to; try again later"
            self.fail(TimedOut(message, "queue_timeout"))

    def _end_late(self) -> None:
        message = "the request took longer than it was allowed to; ask for fewer tokens or for more time"
        self.fail(TimedOut(message, "timeout"))
