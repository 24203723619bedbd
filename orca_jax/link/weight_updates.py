"""Updates of weights in the loop of an engine.

New weights are checked and read in a thread, while the engine serves. Then the front end sends `ReplaceWeights` between
two calls. Requests sent before it finish with the old weights, or are aborted. Those sent after it wait until no other
request is left and the weights are replaced. So all requests of a call have the same weights.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from orca_jax.assembly.built import PrepareUpdate, PutInPlace
from orca_jax.engine import Engine
from orca_jax.errors import ConfigError
from orca_jax.link.wire import Abort, Message, Submit, UpdateWeights, WeightsRead, WeightsUpdated

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedWeights:
    """A message from the reading thread to the main thread: new weights, or the reason for refusing them."""

    update: UpdateWeights
    result: PutInPlace | WeightsUpdated


class WeightUpdates:
    """Updates in the order of their arrival, and the requests kept until weights are replaced.

    Args:
        engine: owned by the main thread.
        prepare: checks new weights.
        post: puts a message into the inbox of the main thread.
        send: sends a message to the front end.
        progress: called after each parameter.
    """

    def __init__(
        self,
        engine: Engine,
        prepare: PrepareUpdate,
        post: Callable[[PreparedWeights], None],
        send: Callable[[Message], None],
        progress: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._prepare = prepare
        self._post = post
        self._send = send
        self._progress = progress
        self._waiting: deque[UpdateWeights] = deque()  # the first one is being read
        self._was_read: PutInPlace | None = None
        self._due: PutInPlace | None = None
        self.is_due = False  # true if new weights wait for the end of all requests
        self._held: list[Submit] = []
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")  # starts its thread when it is needed

    def add(self, update: UpdateWeights) -> None:
        """Read new weights, after those of the updates before."""
        self._waiting.append(update)
        if len(self._waiting) == 1:
            self._read()

    def take(self, prepared: PreparedWeights) -> None:
        """Report the result of a read to the front end: the weights were read, or they are refused."""
        if isinstance(prepared.result, WeightsUpdated):
            self._send(prepared.result)
            self._next()
        else:
            self._was_read = prepared.result
            self._send(WeightsRead(prepared.update.update_id))

    def begin(self) -> None:
        """Use the weights that were read, as soon as no request is live."""
        assert self._was_read is not None, "no weights were read"
        self._due, self._was_read, self.is_due = self._was_read, None, True

    def holds(self, message: Submit | Abort) -> bool:
        """Keep a new request while weights are due, or drop a kept request after its abort.

        Returns:
            True if nothing is left to do. False if the engine must get the message: the abort of a live request.
        """
        if isinstance(message, Submit):
            self._held.append(message)
            return True
        kept = [submit for submit in self._held if submit.request_id != message.request_id]
        is_held = len(kept) < len(self._held)
        self._held = kept
        return is_held

    def replace(self) -> list[Submit]:
        """Put the new weights in place, and return the requests that waited for them. No request may be live."""
        assert self._due is not None, "no weights are due"
        update, put, self._due, self.is_due = self._waiting[0], self._due, None, False
        version = self._engine.update_weights(lambda: put(self._progress), update.version)
        self._send(WeightsUpdated(update.update_id, version))
        self._next()
        held, self._held = self._held, []
        return held

    def close(self) -> None:
        """Read no more weights."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        self._waiting.popleft()
        if self._waiting:
            self._read()

    def _read(self) -> None:
        self._reader.submit(self._read_first, self._waiting[0])

    def _read_first(self, update: UpdateWeights) -> None:
        """Check and read in its own thread, and report the result or the failure to the main thread."""
        result: PutInPlace | WeightsUpdated
        try:
            result = self._prepare(update.source)
        except ConfigError as error:
            result = WeightsUpdated(update.update_id, error=error.message, param=error.param)
        except BaseException as error:  # also a panic of a library: each update gets an answer
            logger.exception("new weights cannot be read")
            result = WeightsUpdated(update.update_id, error=f"the weights cannot be read: {type(error).__name__}")
        self._post(PreparedWeights(update, result))
