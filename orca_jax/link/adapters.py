"""The front end's part of loading adapters: calls that wait for the engine's answer."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection

from orca_jax.errors import RequestError
from orca_jax.link.wire import AdapterAnswer, LoadAdapter, UnloadAdapter

logger = logging.getLogger(__name__)

SendChange = Callable[[LoadAdapter | UnloadAdapter], None]


class AdapterCalls:
    """Sends changes of the adapters, and waits for their answers.

    Args:
        send: sends a message to the engine; raises `LinkError` if the engine does not serve.

    Attributes:
        loaded: the paths of the adapters loaded and not unloaded by these calls, by name.
    """

    def __init__(self, send: SendChange) -> None:
        self.loaded: dict[str, str] = {}
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[int, tuple[LoadAdapter | UnloadAdapter, asyncio.Future[None]]] = {}
        self._again: dict[int, str] = {}  # names that a new engine loads again

    async def load(self, name: str, path: str) -> None:
        """Load an adapter.

        Raises:
            RequestError: the engine refuses it; `param` names the field.
            LinkError: the engine does not serve, or ends.
        """
        await self._call(LoadAdapter(next(self._numbers), name, path))

    async def unload(self, name: str) -> None:
        """Refuse an adapter to new requests. Raises as `load` does."""
        await self._call(UnloadAdapter(next(self._numbers), name))

    def load_again(self, names: Collection[str]) -> None:
        """Load everything that is loaded into a new engine, without waiting for it.

        Args:
            names: adapters of the new engine. One with the name of a loaded adapter is replaced.
        """
        for name, path in self.loaded.items():
            if name in names:
                self._send(UnloadAdapter(next(self._numbers), name))
            number = next(self._numbers)
            self._again[number] = name
            self._send(LoadAdapter(number, name, path))

    def take(self, answer: AdapterAnswer) -> None:
        """Take an answer of the engine."""
        name = self._again.pop(answer.number, None)
        if name is not None and answer.error is not None:
            self.loaded.pop(name, None)
            logger.warning("the adapter %s cannot be loaded again: %s", name, answer.error)
        if answer.number not in self._open:
            return
        change, future = self._open.pop(answer.number)
        if answer.error is None:
            self._record(change)
        if future.done():
            return  # its caller has gone, and the engine has made the change all the same
        if answer.error is None:
            future.set_result(None)
        else:
            future.set_exception(RequestError(answer.error, param=answer.param))

    def fail(self, error: Exception) -> None:
        """End all calls with an error: the engine has ended, or the server stops."""
        for _, future in self._open.values():
            if not future.done():
                future.set_exception(error)
        self._open.clear()
        self._again.clear()

    async def _call(self, change: LoadAdapter | UnloadAdapter) -> None:
        self._send(change)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[change.number] = change, future
        await future

    def _record(self, change: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(change, LoadAdapter):
            self.loaded[change.name] = change.path
        else:
            self.loaded.pop(change.name, None)
