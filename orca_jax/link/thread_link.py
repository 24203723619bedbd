"""The engine in a thread of this process, and the link to it."""

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence

from orca_jax.build.engine import Built
from orca_jax.link.client import EngineClient
from orca_jax.link.loop import EngineLoop, EngineStatus, Inbox
from orca_jax.link.wire import Abort, FromEngine, Message, Submit, Updates
from orca_jax.request import RequestUpdate

MOST_HELD = 64  # updates of one request

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine until `stop`. Made in the event loop of `client`, whose link it is.

    Attributes:
        failure: what ended the engine; None while it is well.
        reads_at_once: whether the requests that are sent next may be ended by what they say, so that every update
            counts. All others are heard of when they begin, when they end, and every `MOST_HELD` tokens between: waking
            a reader for every token of every row would cost some 3 % of a small model's speed.
    """

    def __init__(self, built: Built, client: EngineClient) -> None:
        self.failure: Exception | None = None
        self.reads_at_once = True
        self._client = client
        self._outbox = Outbox()
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox = queue.SimpleQueue()
        engine_loop = EngineLoop(built.engine, self._inbox, self._tell, EngineStatus(), built.grammars.compile)
        self._thread = threading.Thread(target=self._run, args=(engine_loop,), name="engine")
        self._thread.start()

    def send(self, message: Submit | Abort) -> None:
        """To the engine."""
        if isinstance(message, Submit) and self.reads_at_once:
            self._outbox.watch(message.request_id)
        self._inbox.put(message)

    async def stop(self) -> None:
        """Let the engine's step end, and no other begin."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self, engine_loop: EngineLoop) -> None:
        try:
            engine_loop.run()
        except Exception as error:
            logger.exception("the engine failed")
            self.failure = error
            self._loop.call_soon_threadsafe(self._client.lose, "dead")

    def _tell(self, message: Message) -> None:
        """In the engine's thread, or in one that compiles grammars."""
        assert isinstance(message, FromEngine)
        if isinstance(message, Updates):
            ready = self._outbox.take(message.updates)
            if not ready:
                return
            message = Updates(ready, message.running, message.waiting)
        self._loop.call_soon_threadsafe(self._client.take, message)


class Outbox:
    """Joins updates of one request that nobody has to read one by one. `take` belongs to one thread."""

    def __init__(self) -> None:
        self._watched: set[str] = set()
        self._held: dict[str, list[RequestUpdate]] = {}

    def watch(self, request_id: str) -> None:
        """Hold nothing of this request back. To be called before its first update, by any thread."""
        self._watched.add(request_id)

    def take(self, updates: Sequence[RequestUpdate]) -> list[RequestUpdate]:
        """What has to be read now, with what was held of the same requests before it."""
        ready: list[RequestUpdate] = []
        for update in updates:
            request_id, is_last = update.request_id, update.finish_reason is not None
            if is_last or update.metrics is not None or request_id in self._watched:
                before = self._held.pop(request_id, None)
                ready.append(update if before is None else joined([*before, update]))
                if is_last:
                    self._watched.discard(request_id)
                continue
            held = self._held.setdefault(request_id, [])
            held.append(update)
            if len(held) == MOST_HELD:
                ready.append(joined(self._held.pop(request_id)))
        return ready


def joined(updates: Sequence[RequestUpdate]) -> RequestUpdate:
    """Updates that follow each other as one. Those before the last bring ids and their log probabilities alone."""
    return updates[-1]._replace(
        new_ids=tuple([token for update in updates for token in update.new_ids]),
        logprobs=tuple([one for update in updates for one in update.logprobs]),
    )
