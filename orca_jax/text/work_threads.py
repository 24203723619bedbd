"""Threads for work on texts of callers: work that takes too long fails its own call, and delays no other kind of work.

Libraries cannot be interrupted, and a regular expression in a tokenizer.json may need hours for a short text. A thread
that exceeds the time limit is abandoned: its call fails, another thread takes its place, and it ends after its work.
The numbers of waiting calls and of abandoned threads are bounded. Idle threads end by themselves, and no thread delays
the end of the process.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

from orca_jax.values.errors import EngineError, RequestError

CHECK_SECONDS = 0.25  # between two checks of the time limit
IDLE_SECONDS = 10.0  # until an idle thread ends
WAITING_SHARE = 2.0  # times the limit of a kind: a call waits no longer for a thread


class WorkKind(NamedTuple):
    """One kind of work, with its own threads.

    Attributes:
        name: the name of the threads.
        doing: the work in words, for errors.
        remedy: advice for the caller whose work takes too long.
        advice: advice for the operator when many threads are stuck.
        param: the field of a call that errors name; None for the whole body.
        seconds: time limit of a call, from the start of its thread.
        num_threads: calls that run at once.
        most_abandoned: threads in addition to `num_threads` that may be stuck in calls beyond their time limit.
        most_waiting: calls that may wait for a thread.
    """

    name: str
    doing: str
    remedy: str
    advice: str
    param: str | None = None
    seconds: float = 10.0
    num_threads: int = 2
    most_abandoned: int = 2
    most_waiting: int = 256


ENCODING = WorkKind(
    "encoding",
    "encoding the text",
    "shorten the text",
    "check the regular expressions in its tokenizer.json",
    "prompt",
    seconds=30.0,  # a megabyte takes less than 1
    num_threads=4,
    most_abandoned=4,
    most_waiting=4096,
)
PARSING = WorkKind(
    "parsing", "reading the body", "shorten the body", "limit the bodies by --max-body-bytes"
)
PREPARING = WorkKind(
    "preparing",
    "preparing the call",
    "shorten the body",
    "limit the bodies by --max-body-bytes",
    seconds=120.0,  # with the times of templates, texts and schemas
    num_threads=4,
    most_abandoned=4,
)
LARGE_PARSING = PARSING._replace(name="parsing-large", num_threads=1)
LARGE_PREPARING = PREPARING._replace(name="preparing-large", num_threads=1)
"""Large bodies one after the other: each holds the interpreter's lock for up to 50 ms at a time."""
SCHEMAS = WorkKind(
    "schemas",
    "reading the JSON schemas",
    "simplify the schemas",
    "limit bodies by --max-body-bytes",
)
TEMPLATES = WorkKind(
    "templates",
    "rendering the conversation",
    "shorten the conversation",
    "check the chat template",
    "messages",
    seconds=60.0,  # the limits of its processes are stricter
)
STORED = WorkKind(
    "stored",
    "reading the stored conversation",
    "begin a new conversation",
    "reduce --responses-store",
    "previous_response_id",
)
PAGES = WorkKind(
    "pages", "making the page", "watch a shorter burst", "restart the server without --playground"
)


class _Work[T]:
    """One call: its work and its result."""

    def __init__(self, work: Callable[[], T], now: float) -> None:
        self.work = work
        self.future: Future[T] = Future()
        self.started = now  # of its wait, and later of its run

    def run(self) -> Callable[[], None]:
        """Do the work; the returned function passes its result or its error to the caller."""
        try:
            result = self.work()
        # also a panic: the thread survives, and the caller gets the error
        except BaseException as error:
            failure = error
            return lambda: self.future.set_exception(failure)
        return lambda: self.future.set_result(result)


class WorkThreads:
    """Runs calls of one kind, in order of arrival. All methods may be called from any thread.

    Args:
        kind: the words and the limits.
        clock: seconds, monotonic.

    Attributes:
        num_abandoned: threads that are stuck in calls beyond their time limit.
    """

    def __init__(self, kind: WorkKind, clock: Callable[[], float] = time.monotonic) -> None:
        self._kind = kind
        self._most_threads = kind.num_threads + kind.most_abandoned
        self._clock = clock
        self._news = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._running: set[_Work] = set()
        self._num_idle = 0
        self.num_abandoned = 0

    @property
    def num_running(self) -> int:
        """The calls that run within their time limit."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The calls that wait for a thread."""
        return len(self._waiting)

    def run_call[T](self, work: Callable[[], T]) -> T:
        """Run a call and wait for its result.

        Raises:
            RequestError: it took longer than the time limit.
            EngineError: too many threads are stuck, or too many calls wait.
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
        job = _Work(work, self._clock())
        with self._news:
            if not self._room:
                raise self._stuck()
            if len(self._waiting) >= self._kind.most_waiting:
                raise self._busy()
            self._waiting.append(job)
            self._start_threads()
            self._news.notify()
        return job.future

    @property
    def _room(self) -> int:
        """The number of threads that may run calls now."""
        return min(self._kind.num_threads, self._most_threads - self.num_abandoned)

    def _start_threads(self) -> None:
        """Start threads for waiting calls; the lock is held."""
        lacking = len(self._waiting) - self._num_idle
        for _ in range(min(lacking, self._room - len(self._running) - self._num_idle)):
            self._num_idle += 1  # until it takes a call
            threading.Thread(target=self._serve, daemon=True, name=self._kind.name).start()

    def _check(self) -> None:
        """Abandon threads beyond the time limit, start others in their place, and refuse calls that wait too long."""
        now = self._clock()
        seconds = self._kind.seconds
        with self._news:
            late = [job for job in self._running if job.started < now - seconds]
            self._running.difference_update(late)
            self.num_abandoned += len(late)
            refused: list[_Work] = []
            while self._waiting and (
                not self._room or self._waiting[0].started < now - WAITING_SHARE * seconds
            ):
                refused.append(self._waiting.popleft())
            reason = self._busy() if self._room else self._stuck()
            if late:
                self._start_threads()
        for job in late:
            message = f"{self._kind.doing} took longer than {seconds:g} s; {self._kind.remedy}"
            job.future.set_exception(RequestError(message, param=self._kind.param))
        for job in refused:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(reason)

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
            while self._waiting or self._news.wait(IDLE_SECONDS) or self._waiting:
                job = self._waiting.popleft() if self._waiting else None
                if job is not None and job.future.set_running_or_notify_cancel():
                    self._num_idle -= 1
                    job.started = self._clock()
                    self._running.add(job)
                    return job
            self._num_idle -= 1
            return None

    def _stuck(self) -> EngineError:
        count = self.num_abandoned
        kind = self._kind
        return EngineError(
            f"{kind.doing} hangs in {count} threads, and none is left for others until one of them ends; {kind.advice}"
        )

    def _busy(self) -> EngineError:
        return EngineError(f"too many calls wait for {self._kind.doing}; try again later")
