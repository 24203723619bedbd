"""The front end's side of updates of weights."""

import asyncio
import itertools
from collections.abc import Callable

from orca_jax.errors import RequestError
from orca_jax.link.wire import ReplaceWeights, UpdateWeights, WeightsRead, WeightsUpdated


class OpenUpdates:
    """Updates of weights from their begin to the answer of the engine.

    Args:
        send: sends a message to the engine.

    Attributes:
        version: the version of the weights in use, as far as is known.
    """

    def __init__(self, send: Callable[[UpdateWeights | ReplaceWeights], None]) -> None:
        self.version = 0
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[str, tuple[asyncio.Future[int], bool]] = {}  # True: aborts requests

    async def run(self, source: str, version: int | None, *, aborts: bool) -> int:
        """Replace the weights, as `EngineClient.update_weights` does."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        update_id = f"u{next(self._numbers)}"
        self._open[update_id] = future, aborts
        self._send(UpdateWeights(update_id, source, version))
        return await future

    def take(self, message: WeightsRead | WeightsUpdated) -> None:
        """Take an answer of the engine. One to an update that `fail` has ended is ignored."""
        if message.update_id not in self._open:
            return
        if isinstance(message, WeightsRead):
            self._send(ReplaceWeights(message.update_id, self._open[message.update_id][1]))
            return
        future, _ = self._open.pop(message.update_id)
        if message.error is None:
            self.version = message.version
        if future.done():  # its caller has gone
            return
        if message.error is None:
            future.set_result(message.version)
        else:
            future.set_exception(RequestError(message.error, message.param))

    def fail(self, error: Exception) -> None:
        """End all updates: the engine has ended, or the server stops."""
        updates, self._open = self._open, {}
        for future, _ in updates.values():
            if not future.done():
                future.set_exception(error)
