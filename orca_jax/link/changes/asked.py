"""The front end's side of pauses and sleep: calls to the engine."""

from collections.abc import Collection, Sequence
from typing import get_args

from orca_jax.link.calls import EngineCalls, SendCall
from orca_jax.link.wire import (
    ForgetPrefixes,
    Pause,
    PauseMode,
    Resume,
    Sleep,
    SleepTag,
    WakeUp,
)
from orca_jax.values.errors import RequestError

SLEEP_TAGS: tuple[SleepTag, ...] = get_args(SleepTag)


def check_pause(mode: str) -> None:
    """Refuse a mode of pauses that does not exist. Raises RequestError."""
    modes = get_args(PauseMode)
    if mode not in modes:
        raise RequestError(f"mode must be one of {', '.join(modes)}, got {mode!r}", "mode")


def check_sleep(level: int, mode: str, asleep: Collection[str]) -> None:
    """Refuse a sleep that cannot begin; `asleep` are the tags of what sleeps. Raises RequestError."""
    if level not in (1, 2):
        raise RequestError(f"level must be 1 or 2, got {level!r}", "level")
    if mode == "keep":
        raise RequestError("mode must be abort or wait: kept requests need their pages", "mode")
    if asleep:
        raise RequestError("the engine sleeps already: wake it up first")


def check_tags(tags: Sequence[str]) -> None:
    """Refuse tags of a sleep that do not exist. Raises RequestError."""
    for tag in tags:
        if tag not in SLEEP_TAGS:
            raise RequestError(f"tags must be of {', '.join(SLEEP_TAGS)}, got {tag!r}", "tags")


class EngineChanges(EngineCalls):
    """Calls that change an engine. All methods raise as `ask` does.

    Attributes:
        is_paused: new calls wait.
        asleep: the tags of what is not in the memory of the devices.
    """

    def __init__(self, send: SendCall) -> None:
        super().__init__(send)
        self.forget()

    def forget(self) -> None:
        """Note another engine: it is awake."""
        self.is_paused = False
        self.asleep = frozenset[SleepTag]()

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache of the devices."""
        await self.ask(ForgetPrefixes())

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Let new calls wait, and return when the pause has begun."""
        check_pause(mode)
        self.is_paused = True
        await self.ask(Pause(mode, clear_cache))

    async def resume(self) -> None:
        """End the pause."""
        await self.ask(Resume())
        self.is_paused = False

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause, and free the devices; see `link/changes/sleep.py`."""
        check_sleep(level, mode, self.asleep)
        was_paused = self.is_paused
        await self.pause(mode)
        try:
            await self.ask(Sleep(level))
        except RequestError:
            if not was_paused:
                await self.resume()
            raise
        self.asleep = frozenset(SLEEP_TAGS)

    async def wake_up(self, tags: Sequence[SleepTag] = SLEEP_TAGS) -> None:
        """Put weights or pages back; the pause ends when all are there."""
        check_tags(tags)
        await self.ask(WakeUp(tuple(tags)))
        self.note_awake(*tags)

    def note_awake(self, *tags: SleepTag) -> None:
        """Note that what these tags name is on the devices; the engine resumes with the last of it."""
        if self.asleep:
            self.asleep -= set(tags)
            self.is_paused = bool(self.asleep)
