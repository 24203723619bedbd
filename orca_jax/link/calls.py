"""The front end's changes of an engine that wait for its answers."""

import asyncio
import itertools
from collections.abc import Callable

from orca_jax.link.wire import EngineAnswer, EngineCall, EngineChange
from orca_jax.values.errors import RequestError

SendCall = Callable[[EngineCall], None]


class EngineCalls:
    """Calls from the moment when they are sent to their answers.

    Args:
        send: sends a call to the engine; raises `LinkError` if the engine does not serve.
    """

    def __init__(self, send: SendCall) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[EngineAnswer]] = {}

    async def ask(self, change: EngineChange, send: SendCall | None = None) -> EngineAnswer:
        """Send a change, and wait for the answer.

        The engine makes the change also if the caller goes meanwhile. So a caller that notes it is shielded.

        Args:
            change: the body of the call.
            send: sends it to another engine than the one that serves; see `EngineCalls`.

        Raises:
            RequestError: the engine refuses it; `param` names the field.
            LinkError: the engine does not serve, or ends.
        """
        call = EngineCall(next(self._numbers), change)
        (send or self._send)(call)
        self._open[call.number] = answer = asyncio.get_running_loop().create_future()
        return await answer

    def end(self, answer: EngineAnswer) -> None:
        """End the call of an answer. An answer to a call that `fail` has ended is ignored."""
        future = self._open.pop(answer.number, None)
        if future is None or future.done():
            return
        if answer.error is None:
            future.set_result(answer)
        else:
            future.set_exception(RequestError(answer.error, answer.param))

    def fail(self, error: Exception) -> None:
        """End all calls with an error: the engine has ended, or the server stops."""
        calls = self._open
        self._open = {}
        for future in calls.values():
            if not future.done():
                future.set_exception(error)
