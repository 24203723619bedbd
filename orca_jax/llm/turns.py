"""The turns of an `LLM`: threads use its engine one after another, and each thread's turns advance the calls of all."""

import contextlib
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orca_jax.engine import Engine
from orca_jax.link.changes.asked import check_pause, check_sleep, check_tags
from orca_jax.link.changes.pauses import Pauses
from orca_jax.link.wire import Pause, PauseMode, Resume, Sleep, SleepTag, WakeUp
from orca_jax.llm.open_requests import OpenCandidate
from orca_jax.llm.pause_gate import PauseGate
from orca_jax.values.errors import EngineError, RequestError
from orca_jax.values.request import RequestUpdate

_MOST_CHANGES = 64  # in a row, while threads wait to run an iteration

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Asking:
    """A thread that has asked for the lock, or has it."""

    lock: threading.Lock  # held until the thread may go on
    is_done: Callable[[], bool] | None  # of a thread that would run an iteration
    has_turn: bool = True  # False if it went on without the lock


class FairLock:
    """A lock for threads in the order of their requests. A context manager.

    A thread that runs iterations asks again at once. With `threading.Lock` it would often keep the others out, although
    its iterations have ended their requests. So a thread that would run an iteration may wait for less: it goes on
    without the lock when its call is done. Changes come before iterations, else a new request would wait for one of
    each other thread, and iterations would run without it. After some changes in a row an iteration comes next.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # held for a few operations
        # of the threads that have asked; the first one has the lock
        self._places: deque[_Asking] = deque()
        self._owner: int | None = None
        self._changes = 0  # in a row

    def __enter__(self) -> None:
        """Wait for the lock. Raises EngineError if this thread has it."""
        self.ask(None)

    def ask(self, is_done: Callable[[], bool] | None) -> bool:
        """Wait for the lock, or until `is_done` is true; None for a change. Returns False without the lock.

        Raises:
            EngineError: this thread has the lock.
        """
        if self._owner == threading.get_ident():
            raise EngineError(
                "this LLM was called within its own iteration, as by a handler of a signal; call it later"
            )
        place = _Asking(threading.Lock(), is_done)
        place.lock.acquire()
        with self._mutex:
            self._places.append(place)
            if self._places[0] is place:
                place.lock.release()
        try:
            place.lock.acquire()
        except BaseException:  # a handler of a signal has raised it
            self._leave(place)
            raise
        if place.has_turn:
            self._owner = threading.get_ident()
        return place.has_turn

    def __exit__(self, *error: object) -> None:
        self._owner = None
        self._leave(self._places[0])

    def _leave(self, place: _Asking) -> None:
        with self._mutex:
            if not place.has_turn:
                return
            is_first = self._places[0] is place
            self._places.remove(place)
            if not is_first:
                return
            for other in [each for each in self._places if each.is_done and each.is_done()]:
                self._places.remove(other)
                other.has_turn = False
                other.lock.release()
            if self._places:
                self._give_next()

    def _give_next(self) -> None:
        """Give the lock to the first change, or to the first thread if there is none or after many."""
        first = self._places[0]
        if self._changes < _MOST_CHANGES:
            first = next((each for each in self._places if each.is_done is None), first)
        self._changes = 0 if first.is_done else self._changes + 1
        self._places.remove(first)
        self._places.appendleft(first)
        first.lock.release()


class Turns:
    """Runs an engine for several threads. A turn adds requests, runs an iteration, or replaces the weights.

    Args:
        engine: used in turns only.

    Attributes:
        open: the candidates that have not ended, by the id of the engine's request.
        pauses: changed in turns only.
    """

    def __init__(self, engine: Engine) -> None:
        self.open: dict[str, OpenCandidate] = {}
        self.pauses = Pauses(engine, lambda _: None)
        self._gate = PauseGate()
        self._engine = engine
        self._lock = FairLock()
        self._dropped: deque[str] = deque()
        self._unusable: str | None = None  # the reason

    def check_usable(self) -> None:
        """Raise EngineError if the engine has failed or was closed."""
        if self._unusable is not None:
            raise EngineError(
                f"this LLM cannot be used any more: {self._unusable}; create a new one"
            )

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Have the engine alone, without an interruption by Ctrl-C. Raises EngineError, as `check_usable` does."""
        try:
            with interrupt_later(), self._lock, self._usable():
                yield
        finally:
            self._gate.look_again()

    @contextlib.contextmanager
    def entry(self) -> Iterator[None]:
        """A turn that adds requests, after the end of a pause. Raises EngineError."""
        pauses = self.pauses
        while True:
            self._gate.wait_for(lambda: not pauses.is_on or self._unusable is not None)
            with self.turn():
                if not pauses.is_on:
                    yield
                    return

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        self.check_usable()
        self._abort_dropped()
        try:
            yield
        finally:
            self._abort_dropped()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Abort these requests at the next turn, or at the end of this one.

        It takes no lock and runs nothing: the garbage collector calls it in any thread, in the middle of anything.
        """
        self._dropped.extend(request_ids)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End open requests with the reason "abort"; their callers get what they have."""
        with self.turn():
            for request_id in request_ids:
                self._engine.abort(request_id)

    def step(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Run one iteration if there is work; its updates may belong to any open call.

        Run none if `is_done` becomes true meanwhile, by an iteration of another thread. Any thread may call it. It
        waits for the end of a pause that keeps requests.
        """
        pauses = self.pauses
        self._gate.wait_for(lambda: not pauses.is_frozen or is_done() or self._unusable is not None)
        with interrupt_later():
            if not self._lock.ask(is_done):
                return
            with contextlib.ExitStack() as stack:
                stack.push(self._lock.__exit__)
                stack.enter_context(self._usable())
                if self._engine.has_work and not pauses.is_frozen:
                    self._step()

    def update_weights(self, put: Callable[[], None], version: int | None, *, aborts: bool) -> int:
        """End the open requests, by aborts or by iterations, and replace the weights. Returns their version.

        Requests that a pause keeps have the new weights from then on.
        """
        with self.turn():
            if aborts:
                self._abort_open()
            if aborts or not self.pauses.is_frozen:
                self._finish_open()
            self._take_updates(self._engine.vacate)  # of kept requests
            with self._failing("an update of the weights failed"):
                version = self._engine.update_weights(put, version)
            for candidate in self.open.values():
                candidate.note_weights(version)
            self.pauses.sleep.take_weights()
            return version

    def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Let new requests wait from now on; return when the pause has begun. Raises RequestError."""
        check_pause(mode)
        pauses = self.pauses
        with self.turn():
            pauses.begin(0, Pause(mode, clear_cache))
            if mode == "abort":
                self._abort_open()

        def is_over() -> bool:
            return not pauses.is_due or pauses.is_frozen or not self._engine.has_work

        while not is_over():
            self.step(is_over)
        with self.turn():
            if pauses.is_due:
                pauses.settle()

    def resume(self) -> None:
        """End the pause. Raises RequestError."""
        with self.turn():
            self.pauses.take_change(Resume())

    def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, and free the devices; see `link/changes/sleep.py`. Raises RequestError."""
        pauses = self.pauses
        check_sleep(level, mode, pauses.sleep.asleep)
        was_paused = pauses.is_on
        self.pause(mode, clear_cache=True)
        try:
            with self.turn():
                pauses.take_change(Sleep(level))
        except RequestError:
            if not was_paused:
                self.resume()
            raise

    def wake_up(self, tags: Sequence[SleepTag]) -> None:
        """Put weights or pages back; the pause ends when all are there. Raises RequestError."""
        check_tags(tags)
        with self.turn():
            self.pauses.take_change(WakeUp(tuple(tags)))

    def forget_prefixes(self) -> None:
        """Empty the prefix cache between two iterations."""
        with self.turn():
            self._engine.forget_prefixes()

    def close(self, free: Callable[[], object]) -> None:
        """Refuse further turns, and call `free`."""
        with interrupt_later(), self._lock:
            self._unusable = "it was closed"
            free()
        self._gate.look_again()

    def _step(self) -> None:
        self._take_updates(self._engine.step)

    def _take_updates(self, run: Callable[[], list[RequestUpdate]]) -> None:
        with self._failing("it failed"):  # the scheduler and the device may no longer agree
            for update in run():
                self._take(update)

    def _finish_open(self) -> None:
        while self._engine.has_work:
            self._step()
            self._abort_dropped()

    def _abort_open(self) -> None:
        for request_id in self.open:
            self._engine.abort(request_id)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Use the engine no more after an error in this block."""
        try:
            yield
        except BaseException as error:
            self._unusable = self._unusable or f"{what} with {type(error).__name__}: {error}"
            raise

    def _take(self, update: RequestUpdate) -> None:
        request = self.open.get(update.request_id)
        if request is None or not request.take_update(update):
            return  # dropped, or not ended
        if update.error is not None:
            logger.warning("request %s failed: %s", update.request_id, update.error)
        # ended by a stop string, which the engine does not look for
        if update.finish_reason is None:
            self._dropped.append(update.request_id)
        else:
            del self.open[update.request_id]
        request.finish(update.metrics)

    def _abort_dropped(self) -> None:
        """Abort the dropped requests. If no request is open then, finish the iterations in flight."""
        if self._unusable is not None:
            return
        while self._dropped:
            request_id = self._dropped.popleft()
            if self.open.pop(request_id, None) is not None:
                self._engine.abort(request_id)
        while not self.open and self._engine.has_work:
            self._step()


@contextlib.contextmanager
def interrupt_later() -> Iterator[None]:
    """Delay Ctrl-C until the iteration is complete, so that the engine can be used afterwards."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    interrupts: list[Any] = []
    signal.signal(signal.SIGINT, lambda *details: interrupts.append(details))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if interrupts:
            previous(*interrupts[0])
