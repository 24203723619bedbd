"""Threads for the work that single requests and calls wait for: compiling a grammar, reading an adapter.

Each kind of work has its own threads, so that one kind never waits for the other. Work that takes too long is given
up: its caller gets an error, and a new thread takes the next work. The old thread cannot be stopped; it ends by itself.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orca_jax.values.errors import RequestError, described

NUM_THREADS = 2  # of each kind
LIMIT_SECONDS = 60.0
TICK_SECONDS = 1.0  # between two looks for late work
MAX_GIVEN_UP = 16  # threads of late work; with more of them, new work is refused

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedKind:
    """A kind of work: texts for refusals, and the parameter that they name."""

    noun: str
    verb: str  # what is done to it, as a participle
    advice: str
    param: str


GRAMMARS = PreparedKind("grammar", "compiled", "give a smaller one", "structured_outputs")
ADAPTERS = PreparedKind(
    "adapter", "read", "move its directory to a faster disk, and load it again", "lora_path"
)


@dataclass(eq=False)
class PendingWork:
    """One piece of work."""

    do: Callable[[], Any]  # raises RequestError
    report: Callable[[Any], None]  # called once with the result or a RequestError, by any thread
    begun: float = 0.0


class Preparation:
    """Does work of one kind in its threads.

    Args:
        kind: the kind of all work.
        limit: seconds for one piece, from its begin on.
        tick: seconds between two looks for late work.

    Attributes:
        num_late: pieces that were given up.
    """

    def __init__(
        self, kind: PreparedKind, limit: float = LIMIT_SECONDS, tick: float = TICK_SECONDS
    ) -> None:
        self.num_late = 0
        self._kind = kind
        self._limit = limit
        self._tick = tick
        self._lock = threading.Lock()
        self._waiting: deque[PendingWork] = deque()
        self._running: set[PendingWork] = set()
        self._given_up = 0  # threads that still run late work
        self._is_closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def submit(self, do: Callable[[], Any], report: Callable[[Any], None]) -> PendingWork:
        """Queue a piece of work."""
        work = PendingWork(do, report)
        with self._lock:
            is_full = self._given_up >= MAX_GIVEN_UP
            if not is_full:
                self._waiting.append(work)
                self._start_next()
        if is_full:
            message = f"{MAX_GIVEN_UP} {self._kind.noun}s are late and still being {self._kind.verb}; try again later"
            report(RequestError(message, self._kind.param))
        return work

    def cancel(self, work: PendingWork) -> None:
        """Drop a piece that has not begun; one that has begun goes on and reports."""
        with self._lock:
            if work in self._waiting:
                self._waiting.remove(work)

    def close(self) -> None:
        """Begin nothing any more."""
        self._is_closed.set()
        with self._lock:
            self._waiting.clear()

    def _start_next(self) -> None:
        """Begin the next piece in a new thread, if there are few. Called with the lock."""
        if len(self._running) >= NUM_THREADS or (work := self._next()) is None:
            return
        self._thread(self._run, work)
        if self._watcher is None:
            self._watcher = self._thread(self._watch)

    def _next(self) -> PendingWork | None:
        """Begin the next piece. Called with the lock."""
        if not self._waiting:
            return None
        work = self._waiting.popleft()
        work.begun = time.monotonic()
        self._running.add(work)
        return work

    def _thread(self, target: Callable[..., None], *arguments: PendingWork) -> threading.Thread:
        # Daemons: a piece that never ends does not keep the process.
        thread = threading.Thread(
            target=target, args=arguments, daemon=True, name=f"prepare {self._kind.noun}"
        )
        thread.start()
        return thread

    def _run(self, work: PendingWork | None) -> None:
        while work is not None:
            result = self._result(work)
            with self._lock:
                # given up: another thread has taken the place of this one
                if work not in self._running:
                    self._given_up -= 1
                    return
                self._running.remove(work)
                following = self._next()
            work.report(result)
            work = following

    def _result(self, work: PendingWork) -> Any:
        kind = self._kind
        try:
            return work.do()
        except RequestError as error:
            return error
        except BaseException as error:  # also a panic of a library: each call gets an answer
            logger.exception("the %s cannot be %s", kind.noun, kind.verb)
            return RequestError(
                f"the {kind.noun} cannot be {kind.verb}: {described(error)}", kind.param
            )

    def _watch(self) -> None:
        kind = self._kind
        while not self._is_closed.wait(self._tick):
            with self._lock:
                last = time.monotonic() - self._limit
                late = [work for work in self._running if work.begun < last]
                self._running.difference_update(late)
                self._given_up += len(late)
                self.num_late += len(late)
            for work in late:
                message = (
                    f"the {kind.noun} was not {kind.verb} within {self._limit:g} s; {kind.advice}"
                )
                logger.error("%s", message)
                work.report(RequestError(message, kind.param))
                with self._lock:
                    self._start_next()
