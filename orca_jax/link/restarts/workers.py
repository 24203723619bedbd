"""Restarts of a worker of a cluster: a parent process without devices, and one child after another."""

import logging
import os
import signal
import threading
from types import FrameType

from orca_jax.cluster.exits import ExitStatus, exit_now
from orca_jax.link.restarts.bound import FailureCount

logger = logging.getLogger(__name__)


def become_worker() -> None:
    """Return in a new process, and in another one each time that it is killed or ends with its cluster.

    The calling process stays their parent, passes SIGTERM and SIGINT on, and ends with the last of them: after a
    signal, the orderly end of the leader, a wrong setting at the first start, or too many failures. It must have one
    thread, since it forks.
    """
    parent = _Parent()
    while parent.fork():
        code = parent.wait()
        if not parent.continues(code):
            exit_now(ExitStatus.ENGINE_FAILED if code < 0 else code)


class _Parent:
    """The parent's view of its children."""

    def __init__(self) -> None:
        self._stops = threading.Event()
        self._failures = FailureCount()
        self._child: int | None = None
        self._has_failed = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def fork(self) -> bool:
        """Start a child. True in the parent; the child has the signals' defaults, and ends with its parent."""
        parent_is_gone, parent_lives = os.pipe()
        self._child = os.fork()
        if self._child:
            os.close(parent_is_gone)
            self._lives = parent_lives
            return True
        os.close(parent_lives)
        os.setsid()  # Ctrl-C in a terminal comes through the parent, once
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_end_after, args=(parent_is_gone,), daemon=True).start()
        return False

    def wait(self) -> int:
        """Wait for the end of the child; return its exit status, or the negative number of a signal."""
        assert self._child is not None, "no child was started"
        _, status = os.waitpid(self._child, 0)
        self._child = None
        os.close(self._lives)
        return os.waitstatus_to_exitcode(status)

    def continues(self, code: int) -> bool:
        """Wait until the next child may start; False if none is to follow one that ended with this status."""
        if self._stops.is_set() or code == ExitStatus.DONE:
            return False
        if code == ExitStatus.CONFIG and not self._has_failed:
            return False
        self._has_failed = True
        pause = self._failures.pause()
        if pause is None:
            return False
        logger.error("the worker ended with status %d; starting it again in %g s", code, pause)
        return not self._stops.wait(pause)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stops.set()
        if self._child is not None:
            os.kill(self._child, number)


def _end_after(parent_is_gone: int) -> None:
    os.read(parent_is_gone, 1)  # returns at the end of the parent
    exit_now(ExitStatus.ENGINE_FAILED)
