"""The front end's part of loading adapters: those of the engine, and loads of a new engine."""

import asyncio
import logging
from collections import Counter

from orca_jax.link.calls import EngineCalls, SendCall
from orca_jax.link.errors import LinkError, Unavailable
from orca_jax.link.wire import LoadAdapter, UnloadAdapter
from orca_jax.values.errors import RequestError

MOST_ENDS = 2  # of engines, while they load one adapter again

logger = logging.getLogger(__name__)


class ServedAdapters:
    """Changes the adapters of the engine, and notes them.

    Args:
        calls: the calls of the engine.

    Attributes:
        loaded: the paths of the engine's adapters by name: those of the settings, and those loaded by calls.
        lost: adapters that no engine has any more, since a new one could not load them, with the reason. A call may
            load them again.
    """

    def __init__(self, calls: EngineCalls) -> None:
        self.loaded: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        self._calls = calls
        # of engines, by the adapter that they were loading again
        self._ends: Counter[str] = Counter()

    async def load(self, name: str, path: str) -> str:
        """Load an adapter. Returns a note about it, or an empty text. Raises as `EngineCalls.ask` does."""
        return await asyncio.shield(self._load(name, path))

    async def unload(self, name: str) -> None:
        """Refuse an adapter to new requests. Raises as `load` does."""
        await asyncio.shield(self._unload(name))

    async def load_again(self, send: SendCall, ended: asyncio.Event) -> bool:
        """Load everything that is loaded into a new engine, one adapter after the other.

        An adapter is dropped if the engine refuses it, or if `MOST_ENDS` engines have ended while they loaded it. Its
        files may have changed since the first load, and must not end every later engine.

        Args:
            send: sends a call to the new engine.
            ended: set when the engine has ended.

        Returns:
            False if the engine ended meanwhile.
        """
        end = asyncio.create_task(self._fail_after(ended))
        try:
            for name, path in tuple(self.loaded.items()):
                try:
                    await self._load(name, path, send)
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

    async def _load(self, name: str, path: str, send: SendCall | None = None) -> str:
        answer = await self._calls.ask(LoadAdapter(name, path), send)
        self.loaded[name] = path
        self.lost.pop(name, None)
        return answer.note

    async def _unload(self, name: str) -> None:
        await self._calls.ask(UnloadAdapter(name))
        self.loaded.pop(name, None)

    async def _fail_after(self, ended: asyncio.Event) -> None:
        await ended.wait()
        self._calls.fail(Unavailable("the engine has ended"))

    def _lose(self, name: str, reason: str) -> None:
        self.loaded.pop(name, None)
        self.lost[name] = reason
        logger.error(
            "the adapter %s is not loaded any more: %s; requests for it are refused", name, reason
        )
