"""Threads for encoding texts: a text that takes too long fails its own call, and delays no other one.

The tokenizer library cannot be interrupted, and a regular expression in a tokenizer.json may need hours for a short
text. A thread that exceeds the time limit is abandoned: its call fails, another thread takes its place, and it ends
after its text. The number of abandoned threads is bounded. Idle threads end by themselves, and no thread delays the end
of the process.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from orca_jax.errors import EngineError, RequestError

ENCODE_SECONDS = 30.0  # for the texts of one call, from the start of their thread; a megabyte takes less than 1
NUM_THREADS = 4
MOST_ABANDONED = 4  # in addition to `NUM_THREADS`
CHECK_SECONDS = 0.25  # between two checks of the time limit
IDLE_SECONDS = 10.0  # until an idle thread ends


class _Work[T]:
    """One call: its work and its result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.future: Future[T] = Future()
        self.started = 0.0  # on the clock of the threads

    def run(self) -> Callable[[], None]:
        """Do the work; the returned function passes its result or its error to the caller."""
        try:
            result = self.work()
        except BaseException as error:  # also a panic: the thread survives, and the caller gets the error
            failure = error
            return lambda: self.future.set_exception(failure)
        return lambda: self.future.set_result(result)


class EncodingThreads:
    """Runs calls of a tokenizer, in order of arrival. All methods may be called from any thread.

    Args:
        seconds: time limit of a call, from its start.
        num_threads: calls that run at once.
        most_abandoned: threads in addition to `num_threads` that may be stuck in calls beyond their time limit.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        seconds: float = ENCODE_SECONDS,
        num_threads: int = NUM_THREADS,
        most_abandoned: int = MOST_ABANDONED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._num_threads = num_threads
        self._most_threads = num_threads + most_abandoned
        self._clock = clock
        self._news = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._running: set[_Work] = set()
        self._num_idle = 0
        self.num_abandoned = 0

    def run_call[T](self, work: Callable[[], T]) -> T:
        """Run a call and wait for its result.

        Raises:
            RequestError: it took longer than the time limit.
            EngineError: too many threads are stuck.
            BaseException: the error of the call.
        """
        future = self._submit(work)
        try:
            while not future.done():
                wait([future], CHECK_SECONDS)
                self._check()
            return future.result()
        finally:
            future.cancel()  # the caller may be interrupted while the call waits for a thread

    async def run_async[T](self, work: Callable[[], T]) -> T:
        """Run a call without blocking the event loop. Raises the same errors as `run_call`."""
        future = asyncio.wrap_future(self._submit(work))
        try:
            while not future.done():
                await asyncio.wait([future], timeout=CHECK_SECONDS)
                self._check()
            return future.result()
        finally:
            future.cancel()  # the caller may be cancelled while the call waits for a thread

    def _submit[T](self, work: Callable[[], T]) -> Future[T]:
        job = _Work(work)
        with self._news:
            if not self._room:
                raise _stuck(self.num_abandoned)
            self._waiting.append(job)
            self._start_threads()
            self._news.notify()
        return job.future

    @property
    def _room(self) -> int:
        """The number of threads that may run calls now."""
        return min(self._num_threads, self._most_threads - self.num_abandoned)

    def _start_threads(self) -> None:
        """Start threads for waiting calls; the lock is held."""
        lacking = len(self._waiting) - self._num_idle
        for _ in range(min(lacking, self._room - len(self._running) - self._num_idle)):
            self._num_idle += 1  # until it takes a call
            threading.Thread(target=self._serve, daemon=True, name="encoding").start()

    def _check(self) -> None:
        """Abandon threads beyond the time limit, and start others in their place."""
        with self._news:
            latest = self._clock() - self._seconds
            late = [job for job in self._running if job.started < latest]
            if not late:
                return
            self._running.difference_update(late)
            self.num_abandoned += len(late)
            refused: list[_Work] = []
            if not self._room:
                refused, self._waiting = list(self._waiting), deque()
            self._start_threads()
        for job in late:
            message = f"encoding the text took longer than {self._seconds:g} s; shorten the text"
            job.future.set_exception(RequestError(message, param="prompt"))
        for job in refused:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_stuck(self.num_abandoned))

    def _serve(self) -> None:
        """Run calls, and end after an idle period. This is the main function of a thread; a new one counts as idle."""
        while (job := self._take()) is not None:
            deliver = job.run()
            with self._news:
                is_late = job not in self._running
                if is_late:
                    self.num_abandoned -= 1
                else:
                    self._running.remove(job)
                may_stay = len(self._running) + self._num_idle < self._room
                self._num_idle += may_stay
            if not is_late:
                deliver()
            if not may_stay:
                return

    def _take(self) -> _Work | None:
        """Wait for a call; None if the thread must end. The thread is counted as idle before."""
        with self._news:
            while True:
                if not self._waiting and not self._news.wait(IDLE_SECONDS) and not self._waiting:
                    self._num_idle -= 1
                    return None
                while self._waiting:
                    job = self._waiting.popleft()
                    if job.future.set_running_or_notify_cancel():
                        self._num_idle -= 1
                        job.started = self._clock()
                        self._running.add(job)
                        return job


def _stuck(count: int) -> EngineError:
    return EngineError(
        f"the tokenizer hangs in {count} threads, and no further text can be encoded until one of them ends; "
        f"check the regular expressions in its tokenizer.json"
    )
