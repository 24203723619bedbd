"""Calls of a tokenizer that hang are ended for their callers, and other calls go on."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from orca_jax.text import work_threads
from orca_jax.text.work_threads import ENCODING, WorkThreads
from orca_jax.values.errors import EngineError, RequestError

LIMIT = 10.0  # seconds of the clock below


class Hanging:
    """Calls that hang until `release`, and a clock that stands still until a hang is past its limit."""

    def __init__(self, **settings: int) -> None:
        self.now = 0.0
        self.threads = WorkThreads(
            ENCODING._replace(seconds=LIMIT, **settings), clock=lambda: self.now
        )
        self._events: list[threading.Event] = []
        self._callers = ThreadPoolExecutor(20)

    def hang(self) -> Callable[[], BaseException | None]:
        """Start a call that hangs; the returned function waits for its error."""
        begun, end = threading.Event(), threading.Event()
        self._events.append(end)

        def work() -> None:
            begun.set()
            end.wait()

        call = self._callers.submit(self.threads.run_call, work)
        assert begun.wait(60)
        return lambda: call.exception(60)

    def release(self, number: int | None = None) -> None:
        for event in self._events if number is None else [self._events[number]]:
            event.set()

    def close(self) -> None:
        self.release()
        self._callers.shutdown()


@pytest.fixture(autouse=True)
def fast_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_threads, "CHECK_SECONDS", 0.005)
    monkeypatch.setattr(work_threads, "IDLE_SECONDS", 0.2)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging(num_threads=1, most_abandoned=1, most_waiting=2)
    yield made
    made.close()


def test_results_and_errors_reach_the_caller() -> None:
    class Panic(BaseException):
        pass

    def fail(error: BaseException) -> None:
        raise error

    threads = WorkThreads(ENCODING)
    assert threads.run_call(lambda: 7) == 7
    for error in (Panic("now"), TimeoutError("own"), RequestError("own")):
        with pytest.raises(type(error)) as caught:
            threads.run_call(lambda: fail(error))  # noqa: B023 - runs at once
        assert caught.value is error
    assert asyncio.run(threads.run_async(lambda: 8)) == 8
    with pytest.raises(Panic):
        asyncio.run(threads.run_async(lambda: fail(Panic())))


def test_a_call_that_hangs_fails_and_delays_no_other_one(hanging: Hanging) -> None:
    error = hanging.hang()
    with ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(hanging.threads.run_call, lambda: "next")
        hanging.now = LIMIT + 1
        assert waiting.result(60) == "next"
    late = error()
    assert isinstance(late, RequestError) and "longer than 10 s; shorten the text" in late.message


def test_too_many_hanging_calls_refuse_others_until_one_ends(hanging: Hanging) -> None:
    first = hanging.hang()
    hanging.now = LIMIT + 1
    assert isinstance(first(), RequestError)
    second = hanging.hang()
    with ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(hanging.threads.run_call, lambda: "never")
        hanging.now = 2 * LIMIT + 2
        assert isinstance(second(), RequestError)
        with pytest.raises(EngineError, match=r"hangs in 2 threads.*tokenizer\.json"):
            waiting.result(60)
    with pytest.raises(EngineError, match="hangs in 2 threads"):
        hanging.threads.run_call(lambda: "refused at once")
    hanging.release(0)
    deadline = time.monotonic() + 60
    while hanging.threads.num_abandoned > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert hanging.threads.run_call(lambda: "again") == "again"


def test_calls_beyond_the_bound_of_the_queue_are_refused(hanging: Hanging) -> None:
    hanging.hang()
    threads = hanging.threads
    with ThreadPoolExecutor(2) as callers:
        waiting = [callers.submit(threads.run_call, lambda: "waited") for _ in range(2)]
        while threads.num_waiting < 2:
            time.sleep(0.001)
        assert (threads.num_running, threads.num_waiting) == (1, 2)
        with pytest.raises(
            EngineError, match="too many calls wait for encoding the text; try again later"
        ):
            threads.run_call(lambda: "one too many")
        hanging.release()
        assert [call.result(60) for call in waiting] == ["waited", "waited"]


def test_a_call_waits_no_longer_than_its_kind_allows() -> None:
    """Calls before it may each stay within their own limit."""
    now = [0.0]
    threads = WorkThreads(ENCODING._replace(seconds=LIMIT, num_threads=1), clock=lambda: now[0])
    begun, end = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as callers:
        waiting: list[Future[str]] = []

        def work() -> str:
            waiting.append(callers.submit(threads.run_call, lambda: "waited"))
            while not threads.num_waiting:
                time.sleep(0.001)
            now[0] = 2 * LIMIT + 1
            job = next(iter(threads._running))
            job.started = now[0]  # as if it had begun just now
            begun.set()
            end.wait(60)
            return "ran"

        running = callers.submit(threads.run_call, work)
        assert begun.wait(60)
        assert isinstance(waiting[0].exception(60), EngineError)
        end.set()
        assert running.result(60) == "ran"


def test_the_event_loop_goes_on_beside_a_hanging_call(hanging: Hanging) -> None:
    async def act() -> None:
        begun, end = threading.Event(), threading.Event()
        stuck = asyncio.create_task(hanging.threads.run_async(lambda: (begun.set(), end.wait())))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        queued = asyncio.create_task(hanging.threads.run_async(lambda: "queued"))
        gone = asyncio.create_task(
            hanging.threads.run_async(lambda: pytest.fail("its caller has gone"))
        )
        await asyncio.sleep(0.02)
        assert not stuck.done() and not queued.done()
        gone.cancel()
        hanging.now = LIMIT + 1
        assert await queued == "queued"
        with pytest.raises(RequestError):
            await stuck
        end.set()

    asyncio.run(asyncio.wait_for(act(), 60))


def test_idle_threads_end_and_others_start_again() -> None:
    def names() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "encoding"]

    before = set(names())
    threads = WorkThreads(ENCODING._replace(num_threads=3))
    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as callers:
        assert sorted(
            callers.map(
                lambda number: threads.run_call(lambda: number + 0 * barrier.wait(60)), range(3)
            )
        ) == [
            0,
            1,
            2,
        ]
    started = set(names()) - before
    assert len(started) <= 3 and all(thread.daemon for thread in started)
    deadline = time.monotonic() + 60
    while set(names()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(names()) - before
    assert threads.run_call(lambda: 4) == 4
