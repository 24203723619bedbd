"""Threads that wait for the end of a pause."""

import concurrent.futures.thread  # noqa: F401
import threading
from collections.abc import Callable

from orca_jax.values.errors import EngineError

_LOOK_SECONDS = 0.5  # between two looks for threads that could end the pause, once the program ends

_exits = threading.Event()
_waiting = set[threading.Thread]()  # of all gates


class PauseGate:
    """Lets threads wait for a condition. A program that ends does not wait for them, if nothing else runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def wait_for(self, is_open: Callable[[], bool]) -> None:
        """Wait until `is_open` is true; `look_again` must follow what makes it so. Raises EngineError."""
        if is_open():
            return
        thread = threading.current_thread()
        _waiting.add(thread)
        try:
            self._wait_for(is_open)
        finally:
            _waiting.discard(thread)

    def _wait_for(self, is_open: Callable[[], bool]) -> None:
        with self._changed:
            while not is_open():
                if _exits.is_set() and not _can_resume():
                    raise EngineError("the program has ended during a pause: resume it before")
                self._changed.wait(_LOOK_SECONDS)

    def look_again(self) -> None:
        """Let the threads look at their conditions."""
        with self._changed:
            self._changed.notify_all()


def _can_resume() -> bool:
    """True if a thread for which the program waits does not wait itself."""
    main = threading.main_thread()
    return any(
        not thread.daemon and thread is not main and thread not in _waiting
        for thread in threading.enumerate()
    )


# `atexit` comes after Python has joined its threads. The last one to register is called first, so the pools of
# threads, which join theirs in this way, were imported before.
threading._register_atexit(_exits.set)  # type: ignore[attr-defined]
