"""Updates of weights in the loop of an engine.

New weights are checked and read in a thread, while the engine serves. Then the front end sends `ReplaceWeights` between
two calls. Requests sent before it finish with the old weights, or are aborted. Those sent after it wait until no other
request is left and the weights are replaced. So all requests of a call have the same weights. Kept requests of
a pause go on with the new ones.
"""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from orca_jax.assembly.built import PrepareUpdate, PutInPlace
from orca_jax.engine import Engine
from orca_jax.link.wire import EngineAnswer, EngineCall, Message, ReadWeights
from orca_jax.values.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class WeightUpdates:
    """Updates in the order of their arrival.

    Args:
        engine: owned by the main thread.
        prepare: checks new weights.
        report: called by the reading thread with a call and its result: new weights, or the reason for refusing them.
        send: sends a message to the front end.
        progress: called after each parameter.
    """

    engine: Engine
    prepare: PrepareUpdate
    report: Callable[[EngineCall, PutInPlace | RequestError], None]
    send: Callable[[Message], None]
    progress: Callable[[], None]

    def __post_init__(self) -> None:
        # the first one is being read
        self._waiting: deque[tuple[EngineCall, ReadWeights]] = deque()
        self._was_read: PutInPlace | None = None
        # with the number of the call that waits for it
        self._due: tuple[int, PutInPlace] | None = None
        self.is_due = False  # true if new weights wait for the end of all requests
        # starts its thread when it is needed
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def read(self, call: EngineCall, wanted: ReadWeights) -> None:
        """Read new weights, after those of the calls before."""
        self._waiting.append((call, wanted))
        if len(self._waiting) == 1:
            self._read()

    def keep(self, result: PutInPlace | RequestError) -> None:
        """Keep the weights that were read until `begin`. Raises RequestError if they are refused."""
        if isinstance(result, RequestError):
            self._next()
            raise result
        self._was_read = result

    def begin(self, number: int) -> None:
        """Use the weights that were read, as soon as no request is live; then answer the call of this number."""
        assert self._was_read is not None, "no weights were read"
        self._due = (number, self._was_read)
        self._was_read = None
        self.is_due = True

    def replace(self) -> None:
        """Put the new weights in place. No request may have a row."""
        assert self._due is not None, "no weights are due"
        (_, wanted), (number, put), self._due, self.is_due = (
            self._waiting[0],
            self._due,
            None,
            False,
        )
        version = self.engine.update_weights(lambda: put(self.progress), wanted.version)
        self.send(EngineAnswer(number, version=version))
        self._next()

    def close(self) -> None:
        """Read no more weights."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        self._waiting.popleft()
        if self._waiting:
            self._read()

    def _read(self) -> None:
        self._reader.submit(self._read_first, *self._waiting[0])

    def _read_first(self, call: EngineCall, wanted: ReadWeights) -> None:
        """Check and read in its own thread, and report the result or the failure to the main thread."""
        result: PutInPlace | RequestError
        try:
            result = self.prepare(wanted.source)
        except ConfigError as error:
            result = RequestError(error.message, error.param)
        except BaseException as error:  # also a panic of a library: each call gets an answer
            logger.exception("new weights cannot be read")
            result = RequestError(f"the weights cannot be read: {type(error).__name__}")
        self.report(call, result)
