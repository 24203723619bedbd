"""Pauses of an engine, with the modes of vLLM, and its sleep during one.

While it pauses, new requests wait in front of it. Those sent before are aborted, finish, or stay as they are, without
further iterations, until it resumes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from orca_jax.engine import Engine
from orca_jax.link.changes.sleep import EngineSleep
from orca_jax.link.wire import EngineAnswer, Message, Pause, Resume, Sleep, WakeUp


@dataclass(eq=False)
class Pauses:
    """The pause of an engine.

    Args:
        engine: owned by the main thread.
        send: sends a message to the front end.
    """

    engine: Engine
    send: Callable[[Message], None]

    def __post_init__(self) -> None:
        self.is_on = False  # true if new requests must wait
        self.is_frozen = False  # true if no iteration may run
        self.is_due = False  # true if calls wait for the end of requests
        self.sleep = EngineSleep(self.engine, self._end)
        self._clears_cache = False
        self._calls: list[int] = []  # the numbers of those

    def begin(self, number: int, wanted: Pause) -> None:
        """Pause from now on. The call of this number is answered by `settle`."""
        self.is_on = True
        self.is_frozen = wanted.mode == "keep"
        self._clears_cache = wanted.clear_cache
        self.is_due = True
        self._calls.append(number)

    def settle(self) -> None:
        """Answer the calls: no request is left, or all of them are kept."""
        if self._clears_cache and not self.is_frozen:
            self.engine.forget_prefixes()
        self._answer_calls()

    def take_change(self, change: Resume | Sleep | WakeUp) -> None:
        """Sleep during a pause, or end it if nothing sleeps. Raises RequestError."""
        match change:
            case Sleep(level):
                self.sleep.begin(level)
            case WakeUp(tags):
                self.sleep.end(tags)
            case Resume():
                self.sleep.check_awake()
                self._end()

    def _end(self) -> None:
        """Pause no more."""
        self.is_on = False
        self.is_frozen = False
        self._answer_calls()

    def _answer_calls(self) -> None:
        self.is_due = False
        calls = self._calls
        self._calls = []
        for number in calls:
            self.send(EngineAnswer(number))
