"""Grammars and adapters that wait, hang or fail: each call gets its answer, and the others go on."""

import queue
import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.link.loop import EngineLoop, EngineStatus, Inbox
from orca_jax.link.prepare import GRAMMARS, MAX_GIVEN_UP, NUM_THREADS, Preparation
from orca_jax.link.wire import (
    Abort,
    EngineAnswer,
    EngineCall,
    LoadAdapter,
    Message,
    Rejected,
    Submit,
    Updates,
)
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import RequestError
from orca_jax.values.request import Constraint, SamplingParams, StructuredOutput, TokenSet

SHORT = {"limit": 0.05, "tick": 0.01}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of all work: its `now` changes only by the test, so that a slow machine makes no work late."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("orca_jax.link.prepare.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end, so that no thread of a test stays."""
    event = threading.Event()
    yield event
    event.set()


def refusal(results: "queue.SimpleQueue[Any]") -> str:
    result = results.get(timeout=60)
    assert isinstance(result, RequestError) and result.param == "structured_outputs"
    return result.message


def test_late_work_is_given_up_and_the_next_begins(
    released: threading.Event, clock: SimpleNamespace
) -> None:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    begun: queue.SimpleQueue[None] = queue.SimpleQueue()
    grammars = Preparation(GRAMMARS, **SHORT)

    def hang() -> None:
        begun.put(None)
        released.wait()

    for _ in range(2 * NUM_THREADS):
        grammars.submit(hang, results.put)
    for turn in range(2):
        for _ in range(NUM_THREADS):
            begun.get(timeout=60)
        assert grammars.num_late == turn * NUM_THREADS
        clock.now += 1
        late = [results.get(timeout=60) for _ in range(NUM_THREADS)]
        expected = "the grammar was not compiled within 0.05 s; give a smaller one"
        assert [each.message for each in late] == [expected] * NUM_THREADS
    grammars.submit(lambda: "fine", results.put)
    assert results.get(timeout=60) == "fine" and grammars.num_late == 2 * NUM_THREADS
    released.set()
    grammars.submit(lambda: "fine again", results.put)
    assert results.get(timeout=60) == "fine again", "the late ones report nothing more"
    grammars.close()


def test_work_in_time_is_not_given_up() -> None:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    grammars = Preparation(GRAMMARS, limit=30, tick=0.001)
    for number in range(50):
        grammars.submit(lambda number=number: number, results.put)  # type: ignore[misc]
    assert {results.get(timeout=60) for _ in range(50)} == set(range(50))
    assert grammars.num_late == 0
    grammars.close()


def test_threads_of_late_work_are_bounded(released: threading.Event) -> None:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    grammars = Preparation(GRAMMARS, **SHORT)
    for _ in range(MAX_GIVEN_UP):
        grammars.submit(released.wait, results.put)
    for _ in range(MAX_GIVEN_UP):
        assert "was not compiled within" in refusal(results)
    grammars.submit(released.wait, results.put)
    assert refusal(results) == "16 grammars are late and still being compiled; try again later"
    grammars.close()


def test_dropped_work_never_begins(released: threading.Event) -> None:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    grammars = Preparation(GRAMMARS)
    for _ in range(NUM_THREADS):
        grammars.submit(released.wait, results.put)
    dropped = grammars.submit(lambda: pytest.fail("it was dropped"), results.put)
    grammars.submit(lambda: "last", results.put)
    grammars.cancel(dropped)
    released.set()
    assert {results.get(timeout=60) for _ in range(NUM_THREADS + 1)} == {True, "last"}
    grammars.close()


def test_an_unexpected_failure_says_more_than_its_class(caplog: pytest.LogCaptureFixture) -> None:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    grammars = Preparation(GRAMMARS)
    grammars.submit(lambda: int(1e999), results.put)
    expected = (
        "the grammar cannot be compiled: OverflowError: cannot convert float infinity to integer"
    )
    assert refusal(results) == expected and "Traceback" in caplog.text
    grammars.close()


class Anything:
    """A constraint that allows all tokens of the toy."""

    def allowed(self) -> TokenSet:
        return (1 << 257) - 1

    def accept(self, token_id: int) -> None:
        assert 0 <= token_id < 257


def test_adapters_that_hang_delay_no_grammar_and_each_call_ends(
    released: threading.Event, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the other way round; both are counted in the statistics of the heartbeats."""
    monkeypatch.setattr(
        "orca_jax.link.loop.Preparation", partial(Preparation, limit=2.0, tick=0.02)
    )
    engine = build_engine(
        EngineConfig(model="preset:toy", max_model_len=64, enable_lora=True)
    ).engine
    inbox: Inbox = queue.SimpleQueue()
    sent: list[Message] = []
    status = EngineStatus()

    def send(message: Message) -> None:
        sent.append(message)
        ends = [each for each in sent if isinstance(each, EngineAnswer | Rejected)]
        is_done = [
            each
            for each in sent
            if isinstance(each, Updates)
            for one in each.updates
            if one.finish_reason
        ]
        if is_done:
            clock.now = 3.0  # both slow grammars and both slow adapters have begun
        if len(ends) + len(is_done) == 7:
            inbox.put(None)

    def compile_grammar(structured: StructuredOutput) -> Constraint:
        if structured.value.startswith("slow"):
            released.wait()
        return Anything()

    def read(name: str, path: str) -> Any:
        if path == "slow":
            released.wait()
        raise RequestError("nothing is there", "lora_path")

    def grammar(value: str) -> Submit:
        params = SamplingParams(
            2, temperature=0, ignore_eos=True, structured=StructuredOutput("regex", value)
        )
        return Submit(value, [1], params)

    for number, path in enumerate(("slow", "slow", "empty")):
        inbox.put(EngineCall(number, LoadAdapter("a", path)))
    for message in (grammar("fine"), grammar("slow"), grammar("slow too"), grammar("fine again")):
        inbox.put(message)
    give_up = threading.Timer(60, inbox.put, [None])
    give_up.start()
    EngineLoop(engine, inbox, send, status, compile_grammar, reader=read).run_engine()
    give_up.cancel()
    answers = [each.number for each in sent if isinstance(each, EngineAnswer)]
    assert sorted(answers) == [0, 1, 2] and answers[0] != 2, (
        "the third begins when another is given up"
    )
    assert isinstance(sent[0], Updates), "the grammar waited for no adapter"
    late = [each.error or "" for each in sent if isinstance(each, EngineAnswer)]
    assert late[0].startswith("the adapter was not read within 2 s") and "nothing is there" in late
    status.sample(engine)  # the loop may end before the next one is due
    beat = status.heartbeat()
    assert beat.engine is not None and (beat.engine.late_grammars, beat.engine.late_adapters) == (
        2,
        2,
    )


def test_a_grammar_that_is_dropped_or_refused_waits_no_more(released: threading.Event) -> None:
    """An idle engine runs no iteration that would tell the front end."""
    config = EngineConfig(model="preset:toy", max_num_seqs=2)
    inbox: Inbox = queue.SimpleQueue()
    waiting = []

    def compile_grammar(structured: StructuredOutput) -> Constraint:
        if structured.value == "slow":
            released.wait()
        raise RequestError("no grammar", "structured_outputs")

    def send(message: Message) -> None:
        if isinstance(message, Updates):
            waiting.append(message.waiting)
            inbox.put(following.pop(0) if following else None)

    def submit(name: str, value: str | None) -> Submit:
        structured = None if value is None else StructuredOutput("regex", value)
        return Submit(name, [1], SamplingParams(1, ignore_eos=True, structured=structured))

    following: list[Any] = [Abort("slow"), submit("wrong", "wrong")]
    inbox.put(submit("slow", "slow"))
    inbox.put(submit("plain", None))
    give_up = threading.Timer(60, inbox.put, [None])
    give_up.start()
    with build_engine(config) as built:
        loop = EngineLoop(built.engine, inbox, send, EngineStatus(), compile_grammar)
        loop.run_engine()
    give_up.cancel()
    assert waiting == [1, 0, 0]
