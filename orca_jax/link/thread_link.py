"""The engine in a thread of this process, and the link to it."""

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from itertools import chain

from orca_jax.assembly.built import Built
from orca_jax.link.client import EngineClient
from orca_jax.link.loop import EngineLoop, EngineStatus, Inbox
from orca_jax.link.wire import FromEngine, FromFrontEnd, Message, Submit, Updates
from orca_jax.values.request import RequestUpdate

MOST_HELD = 64  # updates of one request joined into one

logger = logging.getLogger(__name__)


class EngineThread:
    """Runs an engine in a thread until `stop`. It is the link of `client`, and made in the client's event loop.

    Attributes:
        failure: the error that ended the engine; None while it is well.
        reads_at_once: True to deliver every update of the requests sent next, since their text may end them (stop
            strings). Updates of other requests are delivered at the start, at the end, and every `MOST_HELD` updates
            in between: waking a reader for each token would cost some 3 % of a small model's speed.
    """

    def __init__(self, built: Built, client: EngineClient) -> None:
        self.failure: BaseException | None = None
        self.reads_at_once = True
        self._client = client
        self._outbox = Outbox()
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox = queue.SimpleQueue()
        self._engine_loop = engine_loop = EngineLoop(
            built.engine,
            self._inbox,
            self._deliver,
            EngineStatus(),
            built.grammars.compile,
            prepare_update=built.prepare_update,
            reader=built.read_adapter,
        )
        self._thread = threading.Thread(target=self._run, args=(engine_loop,), name="engine")
        self._thread.start()

    def send(self, message: FromFrontEnd) -> None:
        if isinstance(message, Submit) and self.reads_at_once:
            self._outbox.watch(message.request_id)
        self._inbox.put(message)

    async def stop(self) -> None:
        """End the thread after the current step."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self, engine_loop: EngineLoop) -> None:
        try:
            engine_loop.run_engine()
        except BaseException as error:  # also a panic of a library: the calls would wait for ever
            logger.exception("the engine failed")
            self.failure = error
            self._loop.call_soon_threadsafe(self._client.lose, "dead")

    def _deliver(self, message: Message) -> None:
        """Pass a message to the client's event loop; called in the engine's thread or a compiling one."""
        assert isinstance(message, FromEngine)
        if isinstance(message, Updates):
            ready = self._outbox.take_updates(message.updates)
            if not ready:
                return
            message = Updates(ready, message.running, message.waiting, message.weight_version)
        self._loop.call_soon_threadsafe(self._client.take_message, message)


class Outbox:
    """Joins updates of one request for readers that need no single tokens. `take_updates` belongs to one thread."""

    def __init__(self) -> None:
        self._watched: set[str] = set()
        self._held: dict[str, list[RequestUpdate]] = {}

    def watch(self, request_id: str) -> None:
        """Deliver every update of this request. Call it before the first one; any thread may call it."""
        self._watched.add(request_id)

    def take_updates(self, updates: Sequence[RequestUpdate]) -> list[RequestUpdate]:
        """The updates to deliver now, each joined with the held ones of its request."""
        ready: list[RequestUpdate] = []
        for update in updates:
            request_id = update.request_id
            is_last = update.finish_reason is not None
            if is_last or update.metrics is not None or request_id in self._watched:
                before = self._held.pop(request_id, [])
                ready.append(joined([*before, update]))
                if is_last:
                    self._watched.discard(request_id)
                continue
            held = self._held.setdefault(request_id, [])
            held.append(update)
            if len(held) == MOST_HELD:
                ready.append(joined(self._held.pop(request_id)))
        return ready


def joined(updates: Sequence[RequestUpdate]) -> RequestUpdate:
    """One update for several consecutive ones. All but the last may only have ids and log probabilities."""
    if len(updates) == 1:
        return updates[0]
    return updates[-1]._replace(
        new_ids=tuple(chain.from_iterable([update.new_ids for update in updates])),
        logprobs=tuple(chain.from_iterable([update.logprobs for update in updates])),
    )
