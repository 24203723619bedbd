"""Pauses and sleep of `LLM`: what becomes of open calls, and of those of other threads that come later."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.exec.executor import JaxExecutor
from orca_jax.link.wire import PauseMode
from orca_jax.llm.outputs import RequestOutput
from orca_jax.values.errors import ConfigError, EngineError
from tests.rollouts.test_llm import EACH, PROMPTS, small, texts, tree
from tests.rollouts.test_sleep import num_bytes
from tests.rollouts.toy_weights import expected

PROMPT = list(range(1, 13))
VOCAB = 256


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("preset:toy", max_num_seqs=4, max_model_len=4096, page_size=16) as made:
        yield made
        made._turns.step()
        assert not made._turns.open and not made.engine.has_work
        made.engine.pool.check_integrity()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def shift(llm: LLM, number: int, **settings: Any) -> int:
    """Replace the weights of a toy: a number is added to every token."""

    def put() -> None:
        llm.engine.executor._override = lambda *of: (of[2] + number) % VOCAB  # type: ignore[attr-defined]

    return llm._turns.update_weights(put, None, aborts=settings.get("aborts", False))


def later(llm: LLM, pool: ThreadPoolExecutor, prompt: list[int]) -> "Future[list[RequestOutput]]":
    """A call of another thread that waits for the end of a pause."""
    call = pool.submit(llm.generate, [prompt], greedy(3), use_tqdm=False)
    time.sleep(0.05)
    assert not call.done()
    return call


def begun(llm: LLM, pool: ThreadPoolExecutor) -> "Future[RequestOutput]":
    """A long call of another thread with some of its tokens."""
    call = pool.submit(lambda: next(llm.stream([PROMPT], greedy(800))))
    while llm.engine.stats.iterations < 20:
        time.sleep(0.001)
    return call


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
def test_open_calls_end_and_later_ones_wait(
    mode: PauseMode, reason: str, llm: LLM, pool: ThreadPoolExecutor
) -> None:
    first = begun(llm, pool)
    llm.pause_generation(mode=mode)
    assert llm.is_paused() and first.result(60).outputs[0].finish_reason == reason
    call = later(llm, pool, [4, 5])
    assert shift(llm, 3) == 1
    llm.resume_generation()
    assert not llm.is_paused()
    [output] = call.result(60)
    assert output.weight_version == 1
    assert list(output.outputs[0].token_ids) == expected([4, 5], 3, 3)


def test_kept_calls_go_on_with_new_weights(llm: LLM, pool: ThreadPoolExecutor) -> None:
    shift(llm, 0)
    first = begun(llm, pool)
    llm.pause_generation(mode="keep")
    call = later(llm, pool, [4, 5])
    before = llm.engine.stats.iterations
    time.sleep(0.05)
    assert llm.engine.stats.iterations == before and not first.done()
    assert shift(llm, 5) == 2 and shift(llm, 3) == 3, "no token is of version 2"
    llm.resume_generation()
    [completion] = first.result(60).outputs
    [(index, version)] = completion.weight_changes
    assert version == 3 and 0 < index < 800
    ids = list(completion.token_ids)
    old = expected(PROMPT, index, 0)
    assert ids[:index] == old and ids[index : index + 50] == expected(PROMPT + old, 50, 3)
    assert list(call.result(60)[0].outputs[0].token_ids) == expected([4, 5], 3, 3)


@pytest.mark.parametrize("how", ["update", "pause"])
def test_kept_calls_can_be_aborted_later(how: str, llm: LLM, pool: ThreadPoolExecutor) -> None:
    first = begun(llm, pool)
    llm.pause_generation(mode="keep")
    if how == "update":
        shift(llm, 3, aborts=True)
    else:
        llm.pause_generation(mode="abort")
    assert first.result(60).outputs[0].finish_reason == "abort"
    assert llm.is_paused()
    llm.resume_generation()


def test_a_pause_that_waits_ends_with_its_resumption(llm: LLM, pool: ThreadPoolExecutor) -> None:
    """Iterations stop in one thread while another one waits for the end of their requests."""
    first = begun(llm, pool)
    pause = pool.submit(llm.pause_generation, mode="wait")
    while not llm.is_paused():
        time.sleep(0.001)
    llm.pause_generation(mode="keep")
    pause.result(60)
    assert not first.done()
    llm.resume_generation()
    assert first.result(60).outputs[0].finish_reason == "length"


def test_calls_that_wait_fail_when_it_is_closed(llm: LLM, pool: ThreadPoolExecutor) -> None:
    first = begun(llm, pool)
    llm.pause_generation(mode="keep")
    call = later(llm, pool, [4, 5])
    llm.close()
    for each in (first, call):
        with pytest.raises(EngineError, match="it was closed"):
            each.result(60)
    llm._turns._unusable = None  # for the checks of the fixture
    llm._turns.drop(tuple(llm._turns.open))
    llm.resume_generation()


def test_wrong_words_are_refused(llm: LLM) -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: llm.pause_generation(mode="stop"), "mode must be one of abort, wait, keep"),  # type: ignore[arg-type]
        (lambda: llm.sleep(3), "level must be 1 or 2, got 3"),
        (lambda: llm.sleep(1, "keep"), "mode must be abort or wait"),
        (llm.sleep, "this engine cannot sleep"),
        (lambda: llm.wake_up(["all"]), "tags must be of weights, kv_cache"),  # type: ignore[list-item]
    ]
    for call, words in wrong:
        with pytest.raises(ConfigError, match=words):
            call()
        assert not llm.is_paused() and not llm.is_sleeping()
    assert llm.generate([[4, 5]], greedy(3), use_tqdm=False)


@pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")
def test_the_devices_are_free_during_sleep(program_cache: str, pool: ThreadPoolExecutor) -> None:
    before = num_bytes()
    with small(program_cache, strict_compile=False) as llm:
        answers = texts(llm.generate(PROMPTS, EACH, use_tqdm=False))
        awake = num_bytes()
        llm.sleep()
        assert num_bytes() - before <= 0.05 * (awake - before)
        call = later(llm, pool, [4, 5])
        with pytest.raises(ConfigError, match="wake it up in place of resuming"):
            llm.resume_generation()
        with pytest.raises(ConfigError, match="sleeps already"):
            llm.sleep()
        llm.wake_up(["weights"])
        assert llm.is_sleeping() and llm.is_paused() and not call.done()
        llm.wake_up()
        assert not llm.is_sleeping() and call.result(60)
        assert texts(llm.generate(PROMPTS, EACH, use_tqdm=False)) == answers
        llm.sleep(2)
        with pytest.raises(ConfigError, match="dropped by level 2"):
            llm.wake_up()
        llm.update_params(tree(0))
        llm.wake_up(["kv_cache"])
        assert texts(llm.generate(PROMPTS, EACH, use_tqdm=False)) != answers
        assert isinstance(llm.engine.executor, JaxExecutor)
        assert llm.engine.executor.stats.compiles_while_serving == 0


_EXITS = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from orca_jax import LLM, SamplingParams

llm = LLM("preset:toy", max_num_seqs=64, max_model_len=4096, page_size=16)
params = SamplingParams(max_tokens=int(sys.argv[2]), temperature=0, ignore_eos=True)
seen = []

def call():
    try:
        seen.append(len(llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0].token_ids))
    except BaseException as error:
        seen.append(str(error))
    if len(seen) == 64:
        print(*sorted(set(map(str, seen))), sep="; ", flush=True)

kind = sys.argv[1]
if kind == "paused":
    llm.pause_generation(mode="keep")
if kind == "resumed":
    llm.pause_generation(mode="keep")
    def resume():
        time.sleep(1.5)
        llm.resume_generation()
    threading.Thread(target=resume).start()
if kind == "pool":
    pool = ThreadPoolExecutor(64)
    for _ in range(64):
        pool.submit(call)
else:
    for _ in range(64):
        threading.Thread(target=call, daemon=kind == "daemons").start()
while kind in ("pool", "daemons", "threads") and llm.engine.stats.iterations < 3:
    time.sleep(0.001)
raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("kind", "tokens", "said"),
    [
        ("threads", 40, "40"),  # Python waits for them, so each gets its answer
        ("pool", 40, "40"),
        ("daemons", 4000, ""),  # and for these it does not
        ("paused", 40, "the program has ended during a pause: resume it before"),
        ("resumed", 40, "40"),
    ],
)
def test_a_program_ends_while_64_calls_run(kind: str, tokens: int, said: str) -> None:
    command = [sys.executable, "-c", _EXITS, kind, str(tokens)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (7, said), ended.stderr


def test_64_callers_with_aborts_and_errors(llm: LLM) -> None:
    """Each call that goes on has its tokens, whatever becomes of the others."""
    right = {length: expected([length], 40, 0) for length in range(64)}
    shift(llm, 0)
    ready = threading.Barrier(64)

    def run(caller: int) -> int:
        ready.wait(60)
        done = 0
        for turn in range(6):
            kind = (caller * 7 + turn * 5) % 6
            if kind == 0:
                stream = llm.stream([[caller], [caller, 1]], greedy(40))
                if turn % 2:
                    next(stream)
                del stream
            elif kind == 1:
                pieces = llm.stream_text([caller], greedy(800))
                next(pieces)
                pieces.close()  # type: ignore[attr-defined]
            elif kind == 2:
                with pytest.raises(KeyError):
                    _fail_within(llm, caller)
            elif kind == 3:
                with pytest.raises(ValueError, match="max_tokens"):
                    llm.generate([[caller]] * 3, greedy(5000), use_tqdm=False)
            else:
                [output] = llm.generate([[caller]], greedy(40), use_tqdm=False)
                assert list(output.outputs[0].token_ids) == right[caller]
                done += 1
        return done

    with ThreadPoolExecutor(64) as callers:
        assert sum(callers.map(run, range(64), timeout=120)) > 64


def _fail_within(llm: LLM, caller: int) -> None:
    for _ in llm.stream([[caller], [caller, 2, 3]], greedy(20)):
        raise KeyError(caller)
