"""A thread that waits for results of the device, so that the engine's thread can wait for messages meanwhile."""

import contextlib
import queue
import threading
from collections.abc import Callable

from orca_jax.step import Handle


class ResultWaiter:
    """Waits for iterations in flight, one after another. Its thread starts with the first one.

    An engine with a full pipeline needs no such thread. The way through it costs a switch of threads in both
    directions.

    Args:
        wait: `Executor.wait`.
        wake: called by the thread with each handle, when its result is ready.
    """

    def __init__(self, wait: Callable[[Handle], None], wake: Callable[[Handle], None]) -> None:
        self._wait = wait
        self._wake = wake
        self._handles: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, handle: Handle) -> None:
        """Call `wake` when an iteration is ready. Handles come in the order of submission, each once."""
        if self._thread is None:  # a daemon: a device that hangs must not keep the process
            self._thread = threading.Thread(target=self._run, name="result", daemon=True)
            self._thread.start()
        self._handles.put(handle)

    def close(self) -> None:
        """End the thread after the iterations being watched, without waiting for it."""
        self._handles.put(None)

    def _run(self) -> None:
        while (handle := self._handles.get()) is not None:
            with contextlib.suppress(Exception):  # `Executor.collect` raises it in the engine's thread
                self._wait(handle)
            self._wake(handle)
