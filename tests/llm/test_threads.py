"""`LLM` in several threads: each turn of the engine belongs to one of them, and a dropped `LLM` frees its memory."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.llm.outputs import RequestOutput
from orca_jax.llm.turns import FairLock
from orca_jax.sim.toy import ToyExecutor
from orca_jax.values.errors import EngineError
from orca_jax.values.request import RequestUpdate
from tests.sim.oracle import toy_generate


def params_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def is_right(output: RequestOutput, max_tokens: int) -> bool:
    wanted = toy_generate(
        list(output.prompt_token_ids), params_of(max_tokens), vocab_size=257, eos_token_ids=(256,)
    )
    return output.outputs[0].token_ids == tuple(wanted)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(model="preset:toy", max_num_seqs=4, max_model_len=4096, page_size=16) as made:
        yield made
        made.engine.pool.check_integrity()


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Let Python change from thread to thread as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("many_switches")
def test_four_threads_get_the_outputs_of_their_prompts(llm: LLM) -> None:
    """Beside them the weights are replaced, and streams are dropped. No output has tokens of two versions."""

    def run(thread: int) -> list[int]:
        versions = []
        for turn in range(4):
            prompts = [[thread, turn, index] for index in range(5)]
            llm.stream(prompts, params_of(1000))
            pieces = llm.stream_text([thread], params_of(20))
            next(pieces)
            outputs = llm.generate(prompts, params_of(10 + turn), use_tqdm=False)
            assert [list(output.prompt_token_ids) for output in outputs] == prompts
            assert all(is_right(output, 10 + turn) for output in outputs)
            versions += [output.weight_version for output in outputs]
        return versions

    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(run, thread) for thread in range(4)]
        puts: list[int] = []
        while not all(future.done() for future in futures):
            version = llm._turns.update_weights(
                lambda: puts.append(len(llm.engine.pool)), None, aborts=False
            )
            assert version == len(puts)
    assert puts and not any(puts), "an update waits for all requests"
    for future in futures:
        assert future.result() == sorted(future.result())


def test_a_short_call_ends_beside_a_long_one_of_another_thread(llm: LLM) -> None:
    with ThreadPoolExecutor(1) as other:
        pieces = llm.stream_text("long", params_of(3000))
        short = other.submit(llm.generate, "short", params_of(5), use_tqdm=False)
        assert any(short.done() for _ in pieces), "the long call has ended first"
        assert is_right(short.result()[0], 5)


def test_one_thread_reads_two_streams_and_a_half_read_one_blocks_nobody(llm: LLM) -> None:
    first, second = llm.stream_text("one", params_of(30)), llm.stream_text("two", params_of(30))
    next(first), next(second)
    with ThreadPoolExecutor(1) as other:
        (output,) = other.submit(llm.generate, "three", params_of(9), use_tqdm=False).result(60)
    assert is_right(output, 9)
    assert "".join(second) and "".join(first)


def test_a_stream_that_is_dropped_within_a_turn_is_only_noted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may drop it there, in any thread."""
    streams = [llm.stream("dropped", params_of(3000))]
    step, seen = llm.engine.step, []

    def stepping(*args: Any) -> list[RequestUpdate]:
        streams.clear()
        seen.append(len(llm.engine.pool))
        return step(*args)

    monkeypatch.setattr(llm.engine, "step", stepping)
    assert is_right(llm.generate("a", params_of(4), use_tqdm=False)[0], 4)
    assert seen[0] == 2 and seen[2:] == [1] * (len(seen) - 2), (
        "live in its last iteration, and aborted after it"
    )


def test_a_call_within_its_own_iteration_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler of a signal may make it. It would wait for itself for ever."""
    refused: list[str] = []
    step = llm.engine.step

    def stepping(*args: Any) -> list[RequestUpdate]:
        with pytest.raises(EngineError, match="within its own iteration") as caught:
            llm.close()
        refused.append(str(caught.value))
        return step(*args)

    monkeypatch.setattr(llm.engine, "step", stepping)
    assert is_right(llm.generate("a", params_of(2), use_tqdm=False)[0], 2) and refused


def test_a_fair_lock_is_given_in_the_order_of_asking() -> None:
    lock, order = FairLock(), list[int]()

    def take(number: int) -> None:
        with lock:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(5)]
    with lock:
        for count, thread in enumerate(threads, 2):
            thread.start()
            while len(lock._places) < count:
                pass
        interrupted = _interrupted(lock)
    for thread in threads:
        thread.join(60)
    with lock:
        order.append(5)
    assert order == list(range(6)) and interrupted == [True]


def test_changes_come_before_iterations_and_done_calls_need_no_turn() -> None:
    lock, order, is_done = FairLock(), list[str](), threading.Event()

    def step(name: str, done: Callable[[], bool]) -> None:
        has_turn = lock.ask(done)
        order.append(name if has_turn else f"{name} is done")
        if has_turn:
            lock.__exit__()

    def change() -> None:
        with lock:
            order.append("change")

    ends = threading.Thread(target=step, args=("ends", is_done.is_set))
    waits = threading.Thread(target=step, args=("waits", lambda: False))
    threads = [waits, ends, threading.Thread(target=change)]
    with lock:
        for count, thread in enumerate(threads, 2):
            thread.start()
            while len(lock._places) < count:
                pass
        is_done.set()
    for thread in threads:
        thread.join(60)
    assert sorted(order) == ["change", "ends is done", "waits"]
    assert order.index("change") < order.index("waits")


def test_many_changes_do_not_keep_an_iteration_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_jax.llm.turns._MOST_CHANGES", 2)
    lock, order = FairLock(), list[str]()

    def take(name: str, done: Callable[[], bool] | None) -> None:
        lock.ask(done)
        order.append(name)
        lock.__exit__()

    kinds = ["step", "change", "change", "change"]
    threads = [
        threading.Thread(target=take, args=(kind, (lambda: False) if kind == "step" else None))
        for kind in kinds
    ]
    with lock:
        for count, thread in enumerate(threads, 2):
            thread.start()
            while len(lock._places) < count:
                pass
    for thread in threads:
        thread.join(60)
    assert order == ["change", "change", "step", "change"]


def test_threads_that_call_again_and_again_fill_the_batch() -> None:
    """Each iteration has nearly a row of each thread, although their requests end at different times."""
    threads = 16
    with LLM(model="preset:toy", max_num_seqs=threads, max_model_len=4096, page_size=16) as llm:
        ready = threading.Barrier(threads)

        def run(thread: int) -> None:
            ready.wait(60)
            for turn in range(6):
                params = params_of(20 + (7 * thread + 11 * turn) % 20)
                llm.generate([[thread, turn]], params, use_tqdm=False)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(threads)))
        used = llm.engine.stats
        assert used.scheduled_requests / used.iterations > 0.75 * threads, (
            "0.64 if each thread runs an iteration in its turn"
        )


def _interrupted(lock: FairLock) -> list[bool]:
    """Ask for a lock that another thread has; a handler of a signal raises an error during the wait."""
    done: list[bool] = []

    class Place:
        def acquire(self) -> None:
            if done:
                raise KeyboardInterrupt
            done.append(True)

    def ask() -> None:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(
                "orca_jax.llm.turns.threading",
                SimpleNamespace(Lock=Place, get_ident=threading.get_ident),
            )
            lock.__enter__()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(60)
    return done


def test_dropping_it_closes_it_and_its_iterators_keep_it() -> None:
    llm = LLM(model="preset:toy")
    executor = llm.engine.executor
    assert isinstance(executor, ToyExecutor)
    rest = llm.stream("a", params_of(4))
    del llm
    assert not executor._closed and is_right(next(rest), 4)
    del rest
    assert executor._closed


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs", "quick_compiles")
@pytest.mark.parametrize("end", ["del", "close"])
def test_no_array_is_left(end: str, program_cache: str) -> None:
    from tests.rollouts.test_llm import held, small

    before = held()
    llm = small(program_cache)
    llm.generate([[1, 2, 3]], params_of(4), use_tqdm=False)
    finish: Callable[[], None] = llm.close
    if end == "close":
        finish()
    del llm, finish
    assert held() == before
