"""The front end's part of loading adapters: calls that wait for the engine's answer, and loads of a new engine."""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable

from orca_jax.errors import RequestError
from orca_jax.link.errors import LinkError, Unavailable
from orca_jax.link.wire import AdapterAnswer, LoadAdapter, UnloadAdapter

MOST_ENDS = 2  # of engines, while they load one adapter again

logger = logging.getLogger(__name__)

SendChange = Callable[[LoadAdapter | UnloadAdapter], None]


class AdapterCalls:
    """Sends changes of the adapters, and waits for their answers.

    Args:
        send: sends a message to the engine; raises `LinkError` if the engine does not serve.

    Attributes:
        loaded: the paths of the engine's adapters by name: those of the settings, and those loaded by calls.
        lost: adapters that no engine has any more, since a new one could not load them, with the reason. A call may
            load them again.
    """

    def __init__(self, send: SendChange) -> None:
        self.loaded: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[int, tuple[LoadAdapter | UnloadAdapter, asyncio.Future[str]]] = {}
        self._ends: Counter[str] = Counter()  # of engines, by the adapter that they were loading again

    async def load(self, name: str, path: str) -> str:
        """Load an adapter. Returns a note about it, or an empty text.

        Raises:
            RequestError: the engine refuses it; `param` names the field.
            LinkError: the engine does not serve, or ends.
        """
        return await self._call(LoadAdapter(next(self._numbers), name, path), self._send)

    async def unload(self, name: str) -> None:
        """Refuse an adapter to new requests. Raises as `load` does."""
        await self._call(UnloadAdapter(next(self._numbers), name), self._send)

    async def load_again(self, send: SendChange, ended: asyncio.Event) -> bool:
        """Load everything that is loaded into a new engine, one adapter after the other.

        An adapter is dropped if the engine refuses it, or if `MOST_ENDS` engines have ended while they loaded it. Its
        files may have changed since the first load, and must not end every later engine.

        Args:
            send: sends a message to the new engine.
            ended: set when the engine has ended.

        Returns:
            False if the engine ended meanwhile.
        """
        end = asyncio.create_task(self._fail_after(ended))
        try:
            for name, path in tuple(self.loaded.items()):
                try:
                    await self._call(LoadAdapter(next(self._numbers), name, path), send)
                except RequestError as error:
                    self._lose(name, error.message)
        except LinkError:
            self._ends[name] += 1
            if self._ends[name] == MOST_ENDS:
                del self._ends[name]
                self._lose(name, f"{MOST_ENDS} engines ended while they loaded it again")
            return False
        finally:
            end.cancel()
        return True

    async def _fail_after(self, ended: asyncio.Event) -> None:
        await ended.wait()
        self.fail(Unavailable("the engine has ended"))

    def _lose(self, name: str, reason: str) -> None:
        self.loaded.pop(name, None)
        self.lost[name] = reason
        logger.error("the adapter %s is not loaded any more: %s; requests for it are refused", name, reason)

    def take(self, answer: AdapterAnswer) -> None:
        """Take an answer of the engine."""
        if answer.number not in self._open:
            return
        change, future = self._open.pop(answer.number)
        if answer.error is None:
            self._record(change)
        if future.done():
            return  # its caller has gone, and the engine has made the change all the same
        if answer.error is None:
            future.set_result(answer.note)
        else:
            future.set_exception(RequestError(answer.error, param=answer.param))

    def fail(self, error: Exception) -> None:
        """End all calls with an error: the engine has ended, or the server stops."""
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(error)
        self._open.clear()

    async def _call(self, change: LoadAdapter | UnloadAdapter, send: SendChange) -> str:
        send(change)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._open[change.number] = change, future
        return await future

    def _record(self, change: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(change, LoadAdapter):
            self.loaded[change.name] = change.path
            self.lost.pop(change.name, None)
        else:
            self.loaded.pop(change.name, None)
