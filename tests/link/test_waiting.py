"""The main thread of an engine with room for another iteration: it waits for results and messages at once."""

import queue
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from orca_jax.engine import Engine
from orca_jax.link.loop import EngineLoop, EngineStatus, Inbox
from orca_jax.link.supervisor import HangDetector
from orca_jax.link.watch import STEP_FLOOR, ProgressWatch
from orca_jax.link.wire import Abort, Message, Submit, ToEngine, Updates
from orca_jax.sched.chunked import ChunkedScheduler
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.orderings.fcfs import FirstComeFirstServed
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.scheduler import Scheduler
from orca_jax.server_config import ServerConfig
from orca_jax.sim.toy import ToyExecutor
from orca_jax.values.request import RequestUpdate, SamplingParams
from orca_jax.values.step import Handle, StepPlan, StepResult
from tests.sim.oracle import toy_generate

VOCAB, PAGES, PAGE_SIZE, ROWS = 61, 64, 4, 4
SECONDS = 60


class HeldExecutor(ToyExecutor):
    """A toy executor with a device in the hands of the test: an iteration ends when the test calls `end`."""

    def __init__(self) -> None:
        super().__init__(VOCAB, (PAGES,), PAGE_SIZE, ROWS)
        self.submitted: queue.SimpleQueue[str] = queue.SimpleQueue()  # the members of each plan
        self.num_waits = 0
        self.failure: Exception | None = None  # of the device
        self._handles: list[Handle] = []
        self._ended: list[threading.Event] = [threading.Event() for _ in range(100)]
        self._num_ended = 0

    def end(self, number: int = 1) -> None:
        """End the next `number` iterations, in advance if they are not submitted yet."""
        for _ in range(number):
            self._ended[self._num_ended].set()
            self._num_ended += 1

    def submit(self, plan: StepPlan) -> Handle:
        handle = super().submit(plan)
        self._handles.append(handle)
        self.submitted.put(" ".join(member.request_id for member in plan.members))
        return handle

    def is_ready(self, handle: Handle) -> bool:
        return self._end_of(handle).is_set()

    def wait(self, handle: Handle) -> None:
        self.num_waits += 1
        self._compute(handle)

    def collect(self, handle: Handle) -> StepResult:
        self._compute(handle)
        return super().collect(handle)

    def _compute(self, handle: Handle) -> None:
        assert self._end_of(handle).wait(SECONDS)
        if self.failure is not None:
            raise self.failure

    def _end_of(self, handle: Handle) -> threading.Event:
        return self._ended[[each is handle for each in self._handles].index(True)]


class Running:
    """An engine on `HeldExecutor` in a thread, with a front end that keeps all updates."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.now = 0.0
        self.executor = HeldExecutor()
        kv = KVManager(
            (PAGES,), PAGE_SIZE, ROWS, 100 if scheduler.traits.has_reservations else None
        )
        self.pool = RequestPool(kv, vocab_size=VOCAB, max_model_len=64)
        self.engine = Engine(self.executor, scheduler, self.pool)
        self.inbox: Inbox = queue.SimpleQueue()
        self.updates: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
        self.status = EngineStatus(lambda: self.now, ProgressWatch(lambda: self.now, dict))
        self.status.enter("serving")
        loop = EngineLoop(
            self.engine, self.inbox, self._send, self.status, lambda _: pytest.fail("no grammar")
        )
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(loop,))
        self._thread.start()

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.inbox.put(message)

    def submitted(self) -> str:
        """The members of the next plan."""
        return self.executor.submitted.get(timeout=SECONDS)

    def next_update(self) -> RequestUpdate:
        return self.updates.get(timeout=SECONDS)

    def stop(self) -> None:
        self.inbox.put(None)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def _run(self, loop: EngineLoop) -> None:
        try:
            loop.run_engine()
        except RuntimeError as error:
            self.failure = error

    def _send(self, message: Message) -> None:
        assert isinstance(message, Updates)
        self.pool.check_integrity()
        for update in message.updates:
            self.updates.put(update)


Start = Callable[[Scheduler], Running]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Running] = []

    def start(scheduler: Scheduler) -> Running:
        started.append(Running(scheduler))
        return started[-1]

    yield start
    for each in started:
        each.executor.end(20)
        each.stop()


def chunked(depth: int) -> ChunkedScheduler:
    return ChunkedScheduler(ROWS, 16, FirstComeFirstServed(), n_workers=depth)


def request(request_id: str, max_tokens: int = 2) -> Submit:
    return Submit(request_id, [1, 2, 3], SamplingParams(max_tokens, temperature=0))


def tokens(max_tokens: int = 2) -> list[int]:
    return toy_generate([1, 2, 3], SamplingParams(max_tokens, temperature=0), vocab_size=VOCAB)


def test_an_arrival_fills_the_room_of_a_pipeline_at_once(start: Start) -> None:
    """Line 9 of Algorithm 1: A is in flight and nothing can be selected; B comes, and does not wait for A."""
    running = start(OrcaScheduler(max_bs=2, n_workers=2))
    running.send(request("A"))
    assert running.submitted() == "A"
    running.send(request("B"))
    assert running.submitted() == "B"
    assert running.updates.empty() and not running.engine.stats.iterations, "A has not ended"
    running.executor.end()
    assert running.next_update().new_ids == (tokens()[0],)
    assert running.submitted() == "A"
    running.executor.end(3)
    seen = [running.next_update() for _ in range(3)]
    assert [(update.request_id, *update.new_ids) for update in seen] == [
        ("B", tokens()[0]),
        ("A", tokens()[1]),
        ("B", tokens()[1]),
    ]


def test_an_arrival_behind_a_last_token_overlaps_with_it(start: Start) -> None:
    """With two iterations in flight on one device, there is room while the only request draws its last token."""
    running = start(chunked(depth=2))
    running.send(request("A", 1))
    assert running.submitted() == "A"
    running.send(request("B", 1))
    assert running.submitted() == "B"
    running.executor.end(2)
    assert [running.next_update().request_id for _ in "AB"] == ["A", "B"]


def test_a_result_ends_the_wait_too(start: Start) -> None:
    running = start(OrcaScheduler(max_bs=2, n_workers=3))
    running.send(request("A", 4))
    for token in tokens(4):
        assert running.submitted() == "A"
        running.executor.end()
        assert running.next_update().new_ids == (token,)
    assert running.executor.num_waits <= 4, "one for an iteration"


@pytest.mark.parametrize("scheduler", [OrcaScheduler(max_bs=2), chunked(depth=1), chunked(depth=2)])
def test_a_full_pipeline_costs_no_other_thread(start: Start, scheduler: Scheduler) -> None:
    running = start(scheduler)
    running.executor.end(20)
    running.send(request("A", 20))
    while running.next_update().finish_reason is None:
        pass
    assert running.executor.num_waits == 0


def test_two_batches_in_flight_cost_no_other_thread_while_both_run(start: Start) -> None:
    running = start(OrcaScheduler(max_bs=1, n_workers=2))
    running.send(request("A", 20), request("B", 20))
    for request_id in "AB" * 20:
        assert running.submitted() == request_id
        if request_id == "B":
            running.executor.end(2)
    assert running.executor.num_waits <= 2, "for A before B has come, and for B after A has ended"


def test_an_abort_in_flight_takes_effect_after_the_iteration(start: Start) -> None:
    running = start(OrcaScheduler(max_bs=2, n_workers=2))
    running.send(request("A"))
    assert running.submitted() == "A"
    running.send(Abort("A"), request("B", 1))
    assert running.submitted() == "B", "the abort was read before"
    assert running.pool.kv.num_held_rows == 2, "the device still writes into A's pages"
    running.executor.end(2)
    ends = {
        update.request_id: update.finish_reason
        for update in (running.next_update(), running.next_update())
    }
    assert ends == {"A": "abort", "B": "length"}
    running.send(request("C", 1))
    running.executor.end()
    assert running.next_update().request_id == "C"
    assert running.pool.kv.num_held_rows == 0


def test_the_end_of_the_front_end_is_seen_while_an_iteration_is_in_flight(start: Start) -> None:
    running = start(OrcaScheduler(max_bs=2, n_workers=2))
    running.send(request("A"))
    assert running.submitted() == "A"
    running.stop()
    assert running.updates.empty()


def test_a_device_that_hangs_is_found_although_requests_arrive(start: Start) -> None:
    """There is room for another iteration, but no slots for another request, so arrivals only fill the queue."""
    running = start(OrcaScheduler(max_bs=2, n_workers=2))
    running.send(request("A", 60))
    assert running.submitted() == "A"
    detector = HangDetector(ServerConfig())
    detector.serves()
    for number in range(1, int(2 * STEP_FLOOR) + 3):
        running.send(request(f"B{number}", 60))
        wait_for(lambda expected=number + 1: running.pool.num_arrived == expected)
        detector.hear(running.status.heartbeat())
        running.now += 0.5
    verdict = detector.verdict(0, 0) or ""
    assert "no progress for 10 s" in verdict and "link/loop.py:_wait" in verdict


def test_messages_count_as_progress_when_the_device_is_done(start: Start) -> None:
    running = start(OrcaScheduler(max_bs=2, n_workers=2))
    running.send(request("A", 1))
    assert running.submitted() == "A"
    running.executor.end()
    assert running.next_update().finish_reason == "length"
    before = running.status._turns
    running.send(Abort("A"))
    wait_for(lambda: running.status._turns > before)


def test_a_device_that_fails_ends_the_loop(start: Start) -> None:
    running = start(OrcaScheduler(max_bs=2, n_workers=2))
    running.executor.failure = RuntimeError("the device is lost")
    running.send(request("A"))
    assert running.submitted() == "A"
    running.executor.end()
    wait_for(lambda: running.failure is running.executor.failure)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_requests_of_a_call_enter_between_the_same_two_iterations(start: Start) -> None:
    running = start(OrcaScheduler(max_bs=3, n_workers=2))
    running.send(request("A"))
    assert running.submitted() == "A"
    running.send(msgspec.structs.replace(request("B"), has_more=True))
    wait_for(lambda: running.pool.num_arrived == 2)
    running.send(request("C"))
    assert running.submitted() == "B C", "there was room for B alone"
