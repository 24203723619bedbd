"""Sleep of a paused engine: nothing of it is left on the devices, and it wakes up with the same tokens."""

import asyncio
from contextlib import contextmanager

import jax
import pytest

from orca_jax.engine import Engine
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.stage import hold
from orca_jax.link.changes.sleep import EngineSleep
from orca_jax.values.errors import RequestError
from orca_jax.values.request import SamplingParams
from tests.rollouts.toy_weights import Front, ShiftedToy, expected, run_front
from tests.test_same_tokens import greedy_jobs, make_engine, run

PROMPT = [4, 5, 6]
SHORT = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
quick = pytest.mark.usefixtures("compiled_when_used", "few_programs", "quick_compiles")


def num_bytes() -> int:
    """Bytes of all live arrays of this process."""
    return sum(array.nbytes for array in jax.live_arrays())


def stage_arrays(engine: Engine) -> list[jax.Array]:
    """Weights, pages and states of an engine."""
    assert isinstance(engine.executor, JaxExecutor)
    return jax.tree.leaves([(stage._weights, stage.state) for stage in engine.executor.stages])


@quick
@pytest.mark.parametrize("devices", [1, 2])
def test_devices_are_free_during_sleep(devices: int, program_cache: str) -> None:
    jobs, answers = greedy_jobs("qwen3")
    before = num_bytes()
    with contextmanager(make_engine)("qwen3", program_cache, devices, "chunked") as engine:
        assert run(engine, jobs) == answers
        awake = num_bytes()
        sleep = EngineSleep(engine)
        sleep.begin(1)
        assert num_bytes() - before <= 0.05 * (awake - before)
        sleep.end(["kv_cache"])
        assert sleep.asleep == {"weights"}
        with pytest.raises(RequestError, match="the engine sleeps"):
            sleep.check_awake()
        sleep.end(["weights", "kv_cache"])
        sleep.check_awake()
        assert not any(array.is_deleted() for array in stage_arrays(engine))
        assert run(engine, jobs) == answers
        assert engine.executor.stats.compiles_while_serving == 0


@quick
def test_level_two_needs_new_weights(program_cache: str) -> None:
    jobs, answers = greedy_jobs("qwen3")
    with contextmanager(make_engine)("qwen3", program_cache, 1, "chunked") as engine:
        executor = engine.executor
        assert isinstance(executor, JaxExecutor)
        [stage] = executor.stages
        others = [hold(array) for array in stage._weights]
        sleep = EngineSleep(engine)
        sleep.begin(2)
        with pytest.raises(RequestError, match="dropped by level 2: update them"):
            sleep.end(["weights", "kv_cache"])

        def put() -> None:
            for index, each in enumerate(others):
                stage.put_weight(index, each.restore())

        engine.update_weights(put)
        sleep.take_weights()
        sleep.end(["weights", "kv_cache"])
        assert run(engine, jobs) == answers


class Sleeper:
    """Notes what an executor frees and puts back."""

    def __init__(self, toy: ShiftedToy) -> None:
        self.seen: list[str] = []
        executor = toy.engine.executor
        executor.free_devices = lambda keeps_weights: self.seen.append(f"keeps {keeps_weights}")
        executor.restore_weights = lambda: self.seen.append("weights")
        executor.allocate_pages = lambda: self.seen.append("pages")


def test_requests_wait_until_all_is_awake() -> None:
    toy = ShiftedToy(0.001)
    sleeper = Sleeper(toy)

    async def act(front: Front) -> None:
        changes = front.client.changes
        await changes.sleep(1, "wait")
        assert changes.asleep and changes.is_paused
        later = asyncio.create_task(front.answer(PROMPT, SHORT))
        with pytest.raises(RequestError, match="sleeps already"):
            await changes.sleep()
        with pytest.raises(RequestError, match="in place of resuming"):
            await changes.resume()
        await changes.wake_up(["weights"])
        assert changes.asleep == {"kv_cache"} and not later.done()
        await changes.wake_up()
        assert not changes.asleep and not changes.is_paused
        assert (await later)[:2] == (0, [expected(PROMPT, 3, 0)])

    run_front(toy, act)
    assert sleeper.seen == ["keeps True", "weights", "pages"]


def test_an_update_wakes_the_weights_of_level_two() -> None:
    toy = ShiftedToy(0.001)
    sleeper = Sleeper(toy)

    async def act(front: Front) -> None:
        changes = front.client.changes
        await changes.sleep(2)
        assert await front.client.update_weights("3") == 1
        assert changes.asleep == {"kv_cache"}
        await changes.wake_up()
        assert (await front.answer(PROMPT, SHORT))[:2] == (1, [expected(PROMPT, 3, 3)])

    run_front(toy, act)
    assert sleeper.seen == ["keeps False", "pages"]


def test_an_update_ends_the_sleep_if_the_pages_are_back() -> None:
    toy = ShiftedToy(0.001)
    Sleeper(toy)

    async def act(front: Front) -> None:
        changes = front.client.changes
        await changes.sleep(2)
        await changes.wake_up(["kv_cache"])
        assert changes.is_paused
        later = asyncio.create_task(front.answer(PROMPT, SHORT))
        assert await front.client.update_weights("3") == 1
        assert not changes.asleep and not changes.is_paused
        assert (await later)[:2] == (1, [expected(PROMPT, 3, 3)])

    run_front(toy, act)


def test_what_cannot_sleep_goes_on() -> None:
    toy = ShiftedToy(0.001)

    async def act(front: Front) -> None:
        changes = front.client.changes
        for arguments, words in (
            ((3,), "level must be 1 or 2, got 3"),
            ((1, "keep"), "mode must be abort or wait"),
            ((1,), "this engine cannot sleep"),
        ):
            with pytest.raises(RequestError, match=words):
                await changes.sleep(*arguments)
            assert not changes.is_paused and not changes.asleep
        with pytest.raises(RequestError, match="tags must be of weights, kv_cache, got 'all'"):
            await changes.wake_up(["all"])
        assert (await front.answer(PROMPT, SHORT))[:2] == (0, [expected(PROMPT, 3, 0)])

    run_front(toy, act)
