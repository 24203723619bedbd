"""The observation of an engine on behalf of a front end; an engine without a watcher pays nothing for it."""

from collections.abc import Callable
from contextlib import ExitStack

from orca_jax.engine import Engine
from orca_jax.link.wire import Iterations, Message
from orca_jax.timeline.live import LiveTimeline
from orca_jax.timeline.read import encoded
from orca_jax.timeline.writer import TimelineHeader


class EngineWatch:
    """Attaches a `LiveTimeline` to an engine, and detaches it. All methods belong to the engine's thread.

    Args:
        engine: the engine.
        head: its settings.
        send: sends a message to the front end.
    """

    def __init__(
        self, engine: Engine, head: TimelineHeader, send: Callable[[Message], None]
    ) -> None:
        self._engine = engine
        self._head = head
        self._send = send
        self._watching = ExitStack()  # detaches `_live` when it is closed
        self._live: LiveTimeline | None = None

    def turn(self, is_on: bool) -> None:
        """Start or stop sending `Iterations`.

        If they are sent already, only send a `LiveStart` again, for the new viewer.
        """
        if is_on:
            if self._live is None:
                self._live = LiveTimeline(self._engine, self._head, encoded, self._pass_on)
                self._watching.enter_context(self._engine.observed_by(self._live))
            self._live.start()
        else:
            self._watching.close()
            self._live = None

    def _pass_on(self, lines: bytes) -> None:
        self._send(Iterations(lines))
