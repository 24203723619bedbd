"""The observation of an engine on behalf of a front end; an engine without a watcher pays nothing for it."""

from collections.abc import Callable

import msgspec

from orca_jax.engine import Engine
from orca_jax.link.wire import Iterations, Message
from orca_jax.observer import Observer, Observers
from orca_jax.timeline.live import LiveTimeline
from orca_jax.timeline.writer import TimelineHeader


class EngineWatch:
    """Attaches a `LiveTimeline` to an engine, and detaches it. All methods belong to the engine's thread.

    Args:
        engine: the engine.
        head: its settings.
        send: sends a message to the front end.
    """

    def __init__(self, engine: Engine, head: TimelineHeader, send: Callable[[Message], None]) -> None:
        self._engine = engine
        self._head = head
        self._send = send
        self._before: Observer | None = None  # the engine's own observer while it is watched
        self._live: LiveTimeline | None = None

    def turn(self, is_on: bool) -> None:
        """Start or stop sending `Iterations`.

        If they are sent already, only send a `LiveStart` again, for the new viewer.
        """
        if is_on:
            if self._live is None:
                self._before = self._engine.observer
                encode = msgspec.json.Encoder().encode_lines
                self._live = LiveTimeline(self._engine, self._head, encode, self._pass_on)
                # The base class has no events to pass on.
                is_plain = type(self._before) is Observer
                self._engine.observer = self._live if is_plain else Observers(self._before, self._live)
            self._live.start()
        elif self._before is not None:
            self._engine.observer, self._before, self._live = self._before, None, None

    def _pass_on(self, lines: bytes) -> None:
        self._send(Iterations(lines))
