"""Progress of an engine's thread: a hang is found wherever it is, and a busy machine is none."""

import contextlib
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.link.loop import EngineLoop, EngineStatus, Inbox
from orca_jax.link.process_link import EngineLink
from orca_jax.link.supervisor import HangDetector
from orca_jax.link.watch import (
    LONGEST_BEAT,
    STEP_FLOOR,
    ProgressWatch,
    StarvedThreads,
    place_of,
    step_limit,
)
from orca_jax.link.wire import Message, Submit, Updates
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams


def looks(
    watch: ProgressWatch, clock: list[float], *progress: int | None, pause: float = 0.5
) -> list[float]:
    found = []
    for one in progress:
        clock[0] += pause
        found.append(watch.look(one))
    return found


def test_time_without_progress_by_hand() -> None:
    clock = [0.0]
    watch = ProgressWatch(lambda: clock[0], dict)
    assert looks(watch, clock, 1, 1, 1, 2, 2, None, None, 2, 2) == [0, 0.5, 1, 0, 0.5, 0, 0, 0, 0.5]


def test_a_stopped_process_is_not_to_blame() -> None:
    clock = [0.0]
    watch = ProgressWatch(lambda: clock[0], dict)
    assert looks(watch, clock, 1, 1, pause=1000) == [0, LONGEST_BEAT]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 10.0), (0.5, 5.5), (1.0, 1.0), (2.0, 1.0)])
def test_time_without_a_processor_does_not_count(share: float, expected: float) -> None:
    """One thread is ready and does not run for a share of the time; threads that end or begin count as well fed."""
    clock, ended = [0.0], {"ended": 7.0}

    def starved() -> dict[str, float]:
        found = {"idle": 3.0, "starved": share * clock[0], **ended, f"new {clock[0]}": 50.0}
        ended.clear()
        return found

    watch = ProgressWatch(lambda: clock[0], starved)
    assert looks(watch, clock, *[1] * 21)[-1] == expected


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")
# equal names in all processes
@pytest.mark.parametrize("pid", ["self", os.getpid()], ids=["self", "number"])
def test_the_system_counts_starvation_of_each_thread(pid: int | str) -> None:
    found = StarvedThreads(pid).seconds()
    assert len(found) >= threading.active_count() and all(
        seconds >= 0 for seconds in found.values()
    )
    assert StarvedThreads(2**30).seconds() == {}, "there is no such process, or no /proc"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")
@pytest.mark.anyio
async def test_a_link_knows_the_threads_of_an_engine_that_has_started() -> None:
    link = EngineLink(lambda message: None)
    assert link.starved_seconds() == {}
    link._threads = StarvedThreads("self")
    assert len(link.starved_seconds()) >= threading.active_count()


def test_a_wait_counts_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's counter, 5 s, stands still during a wait of 3 s, and has it afterwards."""
    path, clock = tmp_path / "schedstat", [0.0]
    monkeypatch.setattr("orca_jax.link.watch.glob", lambda _: [str(path)])
    threads = StarvedThreads(1, lambda: clock[0])

    def seconds(counters: str, state: str) -> float:
        path.write_text(counters)
        path.with_name("stat").write_text(f"7 (a) R (b) {state} 1 2 3")
        clock[0] += 1.0
        return threads.seconds()[str(path)]

    before, after = "70 5000000000 1", "80 8100000000 2"
    looks = [(before, "S"), *[(before, "R")] * 4, (after, "R"), (after, "S"), (after, "R")]
    assert list(itertools.starmap(seconds, looks)) == [5, 5, 6, 7, 8, 8.1, 8.1, 8.1]


@pytest.mark.parametrize(
    ("expected", "limit"), [(0, STEP_FLOOR), (0.2, STEP_FLOOR), (0.5, 15), (4, 120)]
)
def test_the_limit_follows_from_the_measured_time(expected: float, limit: float) -> None:
    assert step_limit(expected) == limit


class _Ended(Exception):
    """The end of the test, in a function that hangs."""


class Hang:
    """An engine on the toy model in a thread; one of its functions hangs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.end = threading.Event()
        self.begun = threading.Event()
        self.engine: Engine = build_engine(
            EngineConfig(model="preset:toy", max_model_len=64)
        ).engine
        self.inbox: Inbox = queue.SimpleQueue()
        self.status = EngineStatus(lambda: self.now, ProgressWatch(lambda: self.now, dict))
        self.status.enter("serving")
        self.send: Callable[[Message], None] = lambda message: None
        self._thread = threading.Thread(target=self._run)

    def hang(self, *_: object, **__: object) -> None:
        self.begun.set()
        self.end.wait()
        raise _Ended

    def start(self) -> None:
        self._thread.start()
        self.inbox.put(Submit("r", [1, 2], SamplingParams(4)))

    def _run(self) -> None:
        send, compiler = (
            lambda message: self.send(message),
            lambda _: pytest.fail("no grammar was sent"),
        )
        with contextlib.suppress(_Ended):
            EngineLoop(self.engine, self.inbox, send, self.status, compiler).run_engine()

    def verdict_after(self, seconds: float) -> str | None:
        """The verdict of a front end that hears two heartbeats per second for this time."""
        detector = HangDetector(ServerConfig())
        detector.serves()
        for _ in range(int(2 * seconds) + 1):
            detector.hear(self.status.heartbeat())
            self.now += 0.5
        return detector.verdict(0, 0)

    def stop(self) -> None:
        self.end.set()
        self.inbox.put(None)
        self._thread.join(60)


@pytest.fixture
def stuck() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.stop()


@pytest.mark.parametrize("where", ["add_request", "select", "submit", "collect", "deliver", "send"])
def test_a_hang_is_found_wherever_it_is(
    stuck: Hang, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    owners = {
        "add_request": stuck.engine,
        "select": stuck.engine.scheduler,
        "deliver": stuck.engine.pool,
        "send": stuck,
    }
    monkeypatch.setattr(owners.get(where, stuck.engine.executor), where, stuck.hang)
    stuck.start()
    assert stuck.begun.wait(60)
    assert stuck.verdict_after(STEP_FLOOR - 1) is None
    verdict = stuck.verdict_after(STEP_FLOOR + 1)
    place = "link/loop.py:" if where in ("add_request", "send") else "engine.py:"
    assert verdict is not None and "no progress for 10 s" in verdict and place in verdict


def test_an_engine_that_turns_in_vain_is_found(
    stuck: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has work, and its steps do nothing."""

    def step(wait: object) -> list[object]:
        stuck.begun.set()
        if stuck.end.is_set():
            monkeypatch.undo()
        return []

    monkeypatch.setattr(stuck.engine, "step", step)
    stuck.start()
    assert stuck.begun.wait(60)
    assert "no progress" in (stuck.verdict_after(STEP_FLOOR + 1) or "")


def test_an_engine_with_progress_or_without_work_is_well(stuck: Hang) -> None:
    ended = threading.Event()

    def send(message: Message) -> None:
        assert stuck.verdict_after(STEP_FLOOR - 1) is None
        if isinstance(message, Updates) and any(update.finish_reason for update in message.updates):
            ended.set()

    stuck.send = send
    stuck.start()
    assert ended.wait(60)
    deadline = time.monotonic() + 60
    while stuck.status.heartbeat().busy_seconds and time.monotonic() < deadline:
        time.sleep(0.001)
    assert stuck.verdict_after(1000) is None, "it waits for a message"


def test_the_place_of_a_thread_is_the_innermost_function_of_the_package() -> None:
    begun, end = threading.Event(), threading.Event()

    def wait() -> float:
        begun.set()
        end.wait()
        return 0.0

    watch = ProgressWatch(lambda: 0.0, dict)
    watch._clock = wait
    thread = threading.Thread(target=watch.look, args=(1,))
    thread.start()
    assert begun.wait(60) and thread.ident is not None
    place = place_of(thread.ident)
    end.set()
    thread.join(60)
    assert place == ("link/watch.py:look", False)
    assert place_of(thread.ident) == ("", False), "it has ended"
